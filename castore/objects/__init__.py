"""Where bytes live: codecs, frames, loose objects and packs, and reading any range of them back."""
