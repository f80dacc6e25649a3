"""What `gpustackd demo` is made of: real replicas, a watch on the database, and words about both."""
