"""Questions to the user, answers, and what they decide."""
