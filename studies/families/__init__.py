"""Every family of tasks, on cached features of a frozen EfficientNet-Lite0: the whole package is run on all of them."""

from studies.families.task import SEEDS, Task, load_task, tasks

__all__ = ["SEEDS", "Task", "load_task", "tasks"]
