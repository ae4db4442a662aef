"""Named files of settings: `--preset NAME`."""
