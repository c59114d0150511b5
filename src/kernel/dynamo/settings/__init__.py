"""One setting, written once: its field, type, default, flag, variable, reader and meaning stand in one place.

A dataclass is the table of one owner: each field is made with `setting(...)` (`table`), and read by a reader (`readers`).
From the tables come the values of a process (`read_settings`), the flags of every command (`flags`) and the page
docs/settings.md. Nothing is imported here: `dynamo --help` needs the parser of a command (`command`) and no more.
"""

__all__: list[str] = []
