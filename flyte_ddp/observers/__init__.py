"""The observers of a run: what people see of it. Each runs in the parent process and is one file
here.

A new observer is a class with the two methods of `flyte_ddp.events.Listener`, and its name in the
lists of listeners of task_run/run.py and command_line.py, or of whoever calls
`flyte_ddp.run`. It shows `event.figures()`, which is the same for recipes, functions and scripts,
and asks for the kind of an event only where it shows something that is no number.
"""
