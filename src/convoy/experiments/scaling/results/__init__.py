"""From what is kept to tables, pictures, sentences and the report."""
