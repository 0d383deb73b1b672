from titan_loom.config.job_config import JobConfig

__all__ = ["JobConfig"]
