"""What would happen if: plans and explanations over one moment of the database."""
