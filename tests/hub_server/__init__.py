"""A Hugging Face Hub on the loopback interface, for tests: it serves datasets and models to the real clients
(`huggingface_hub`, `HfFileSystem`, `datasets`), takes uploads, misbehaves on demand and counts what it was asked.

    with HubServer() as hub:
        hub.commit("Owner/corpus", fineweb_parts(4, 100, seed=0, row_group_size=20))
        hub.fault("resolve", do="cut", times=2)
        subprocess.run(..., env=os.environ | hub.environment(tmp_path))
        assert hub.count("tree") == 1
"""

from tests.hub_server.faults import FOREVER, Fault
from tests.hub_server.parts import fineweb_parts, readme, stack_parts
from tests.hub_server.server import HubServer, Record

__all__ = ["FOREVER", "Fault", "HubServer", "Record", "fineweb_parts", "readme", "stack_parts"]
