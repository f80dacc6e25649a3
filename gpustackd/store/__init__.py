"""Everything that speaks to a database: statements, connections, tables, and an embedded PostgreSQL."""
