"""`tune`: the search for the settings that reach a goal, what it measures, and the file it writes."""
