"""Where images are, how they are decoded, and where the decoded pixels are kept."""
