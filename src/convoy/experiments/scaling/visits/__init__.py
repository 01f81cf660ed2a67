"""What a rank does when a configuration has its turn: it predicts, measures, or trains."""
