// The files of threads and volumes.
import { address, call, send, sendJSON, signedURL } from "../api/client.ts";
import type { FileListRequest } from "../api/schema.ts";
import type { Source } from "../ui/files.tsx";

const largeFile = 64 << 20; // bytes from which on a file is uploaded in parts

// stored returns the files of a thread or a volume: the newest, or those of a version, which never change.
export function stored(
  source: FileListRequest["source"],
  id: string,
  version: number | undefined,
  mayChange: boolean,
): Source {
  const at = { source, id, version };
  const signed = async (path: string, inline?: boolean) =>
    signedURL((await call("fileDownloadURL", { body: { ...at, path, inline } })).url);
  const files: Source = {
    key: `${source}/${id}/${version ?? ""}`,
    kinds: version ? [] : ["executions"],
    start: "",
    top: [source === "thread" ? "home" : "/data/" + id, ""],
    list: async (path, signal) => (await call("listFiles", { body: { ...at, path } }, signal)).files,
    address: (path) => signed(path),
    inline: (path) => signed(path, true),
  };
  if (version || !mayChange) return files;
  return {
    ...files,
    upload: async (path, file, progress) => {
      const body = { source, id, path, content_length: file.size };
      // A slice has no media type: with one, the signed URL would have to name it.
      if (file.size < largeFile) {
        return send("PUT", signedURL((await call("fileUploadURL", { body })).url), { body: file.slice(0) });
      }
      const upload = await call("createUpload", { body });
      const url = signedURL(upload.url);
      for (let part = 1; part <= upload.parts; part++) {
        progress(`part ${part} of ${upload.parts}`);
        await send("PUT", `${url}?part=${part}`, {
          body: file.slice((part - 1) * upload.part_size, part * upload.part_size),
        });
      }
      await sendJSON("POST", url);
    },
    rename: (path, to) => call("renameFile", { body: { source, id, path, to } }),
    remove: (path, recursive) => call("deleteFile", { body: { source, id, path, recursive } }),
  };
}

// archive returns the address of a tar of a version.
export const archive = (id: string, version?: number) => address("archiveThread", { id, version }).href;
