"""The texts of an export: its model card and what its training is on record with."""

import json
from typing import Any

from titan_loom.hub.families import decode_args, export_of
from titan_loom.training.checkpoint_files import without_places

NOT_EXPORTED = ("lanes", "files")
"""What of a checkpoint's state only a run that goes on has use for."""


def training_metadata(state: dict[str, Any]) -> dict[str, Any]:
    """What an export tells of `state`."""
    return without_places({key: value for key, value in state.items() if key not in NOT_EXPORTED})


def metrics_until(metrics: str, step: int) -> str:
    """The lines of `metrics.jsonl` up to `step`; a line that a crash cut is left out."""
    lines = [line for line in metrics.splitlines() if line.endswith("}")]
    return "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step)


def model_card(state: dict[str, Any], num_parameters: int, dtype: str, metrics: str) -> str:
    """`README.md`: what the model is, what it was trained on, how it is loaded; of `training_metadata`."""
    name = state["model"]["name"]
    args = decode_args(name, state["model"]["args"])
    loops = f"{args.num_layers} layers, {args.num_visits} visits as trained"
    if args.loop_layers:
        loops += f": the layers {', '.join(map(str, args.loop_layers))} (from 0) run {args.num_loops} times"
    last = json.loads(metrics.splitlines()[-1]) if metrics else None
    rows = [
        f"| {source} | {tokens:,} | {_origin(state, source)} |" for source, tokens in state["source_tokens"].items()
    ]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            f"tags: [titan_loom, looped-transformer, {name}]",
            "---",
            "",
            f"# {export_of(name).NAME}, step {state['step']:,}",
            "",
            f"* Parameters: {num_parameters:,} ({dtype})",
            f"* Architecture: {export_of(name).describe(args)}",
            f"* Loops: {loops}",
            f"* Context: {args.max_seq_len:,} tokens; vocabulary: {args.vocab_size:,}",
            f"* Tokens trained on: {state['tokens_seen']:,}",
            *([f"* Loss of the last step: {last['loss']:.4f}"] if last else []),
            "",
            *(["| source | tokens | from |", "|---|---|---|", *rows, ""] if rows else []),
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'name = "path/to/this/folder"  # or of a repository; the modelling code is in it',
            "tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
            "model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)",
            'inputs = tokenizer("def main():", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
            "```",
            "",
            *(
                ["`num_loops`, an argument of `generate` and of the model, replaces the number of loops.", ""]
                if args.loop_layers
                else []
            ),
            "`training_metadata.json` has the configuration, revisions and versions; `metrics.jsonl` every step.",
            "",
        ]
    )


def _origin(state: dict[str, Any], source: str) -> str:
    data, key = state["data"], f"data.sources.{source}"
    commit = data.get(f"{key}.commit")
    return str(data.get(f"{key}.path", "")) + (f" at {commit}" if commit else "")
