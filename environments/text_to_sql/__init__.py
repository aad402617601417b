"""SQL queries, run where that can be done and compared by a judge (see README.md)."""

from gym_serve.environments.text_to_sql.server import TextToSql

__all__ = ["TextToSql"]
