"""A model's tokenizer out of its checkpoint: the one of `jitney.text`, and where it is read from."""

from __future__ import annotations

from pathlib import Path

from jitney.errors import ModelError
from jitney.text import tokenizer
from jitney.text.files import TokenizerFiles
from jitney_worker.text.files import read_files


class Tokenizer(tokenizer.Tokenizer):
    """As an API has it too, which gets its files from Redis."""

    def __init__(self, files: TokenizerFiles, directory: Path) -> None:
        super().__init__(files)
        self._directory = directory

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """From the files of a checkpoint. Raises ModelError that names the file, or the directory."""
        with tokenizer.refusing_damage(directory):
            return cls(read_files(Path(directory)), Path(directory))

    def pack(self) -> bytes:
        """The files as an API unpacks them: `TokenizerFiles.pack`. Read anew, for they are many times the rest.

        Raises ModelError when they are not what was loaded.
        """
        files = read_files(self._directory)
        if files.digest != self.digest:
            raise ModelError(f"{self._directory}: the tokenizer's files have changed since they were loaded")
        return files.pack()
