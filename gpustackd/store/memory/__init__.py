"""The store in memory: the rules of the schema without SQL, for plans and trials."""
