"""Everything that speaks SQL: tables, statements, connections, and a PostgreSQL of one's own."""
