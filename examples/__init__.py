"""Code as users bring it: a task, an engine, models of another library; none of it is known to the project by name."""
