"""Images in: where they are, how they are decoded, and where the decoded pixels are kept."""
