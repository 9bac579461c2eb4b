"""A live sandbox as the backend of a deep agent: where LangChain's deepagents runs commands and keeps files."""

from __future__ import annotations

import shlex

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from ._sync import Sandbox
from .errors import BullpenError, GuestError

__all__ = ["BullpenBackend"]


class BullpenBackend(BaseSandbox):
    """Runs an agent's commands and keeps its files in a live sandbox. timeout is that of a command, in seconds.

        agent = create_deep_agent(model=…, backend=BullpenBackend(client.sandboxes.create(timeout=3600)))
    """

    def __init__(self, sandbox: Sandbox, *, timeout: int = 600) -> None:
        self._sandbox = sandbox
        self._timeout = timeout

    @property
    def id(self) -> str:
        return self._sandbox.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a command for bash. A timeout of 0 is none."""
        seconds = self._timeout if timeout is None else timeout
        # One stream, so that errors stand where they occurred.
        result = self._sandbox.commands.run(f"exec 2>&1; eval {shlex.quote(command)}", timeout=seconds or None)
        output = result.stdout
        if result.timed_out:
            output += f"\nThe command was killed after {seconds} seconds."
        return ExecuteResponse(output=output, exit_code=None if result.exit_code < 0 else result.exit_code,
                               truncated=result.truncated or result.lost > 0)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [self._upload(path, content) for path, content in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [self._download(path) for path in paths]

    def _upload(self, path: str, content: bytes) -> FileUploadResponse:
        try:
            self._sandbox.files.write(path, content)
        except BullpenError as error:
            return FileUploadResponse(path=path, error=_code(error))
        return FileUploadResponse(path=path)

    def _download(self, path: str) -> FileDownloadResponse:
        try:
            return FileDownloadResponse(path=path, content=self._sandbox.files.read(path))
        except BullpenError as error:
            return FileDownloadResponse(path=path, error=_code(error))


def _code(error: BullpenError) -> str:
    """Returns deepagents' code of an error, or its message."""
    codes = {"not_found": "file_not_found", "permission_denied": "permission_denied"}
    if isinstance(error, GuestError):
        if "is a directory" in str(error):
            return "is_directory"
        return codes.get(error.code, str(error))
    return str(error)
