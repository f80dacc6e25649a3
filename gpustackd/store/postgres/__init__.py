"""The store over PostgreSQL: connections, statements, notifications, migrations."""
