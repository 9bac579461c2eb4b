// The results of a batch may be gigabytes: they are streamed, and only what the table shows is kept.
import { address, send } from "../api/client.ts";
import type { BatchResult } from "../api/schema.ts";
import { Terminal } from "../ui/ansi.ts";

export type Row = Pick<BatchResult, "index" | "trace_id" | "status" | "exit_code" | "duration_ms" | "metadata"> & {
  error: string;
};

const maxLine = 1 << 20; // characters of a line that are kept; its outputs may be longer
const maxRead = 8 << 20; // characters that one search reads
const maxRows = 100; // that one search finds

// findResults returns results whose status want accepts, and the cursor of the rest, or null at the end.
export async function findResults(
  id: string,
  cursor: string | undefined,
  want: (status: string) => boolean,
  signal: AbortSignal,
) {
  const after = cursor === undefined ? undefined : Number(cursor);
  return await search(await send("GET", address("getBatchResults", { id, after }), { signal }), want);
}

export async function search(
  answer: Response,
  want: (status: string) => boolean,
): Promise<{ rows: Row[]; next: string | null }> {
  const rows: Row[] = [];
  let read = 0;
  for await (const line of lines(answer)) {
    read += line.length;
    if (line === "") continue;
    const row = rowOf(line);
    if (want(row.status)) rows.push(row);
    if (rows.length === maxRows || read > maxRead) return { rows, next: String(row.index) };
  }
  return { rows, next: null };
}

// lines yields the complete lines of a response, truncated to maxLine.
async function* lines(answer: Response): AsyncGenerator<string> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = "";;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = value.split("\n");
      parts[0] = rest + parts[0];
      rest = parts.pop()!.slice(0, maxLine);
      for (const line of parts) yield line.slice(0, maxLine);
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone
  }
}

// plain strips the control sequences from a line of terminal output.
const plain = (line: string) => new Terminal().write(line).map((s) => s.text).join("");

function rowOf(line: string): Row {
  if (line.length === maxLine) { // cut: the members before the outputs are enough
    const r = JSON.parse(line.slice(0, line.indexOf(`,"stdout":`)) + "}") as BatchResult;
    return { ...r, duration_ms: 0, metadata: {}, error: "The output is too long to show." };
  }
  const r = JSON.parse(line) as BatchResult;
  const error = r.error_message ?? r.error ?? r.stderr?.trimEnd().split("\n").pop() ?? "";
  const { index, trace_id, status, exit_code, duration_ms, metadata } = r;
  return { index, trace_id, status, exit_code, duration_ms, metadata, error: plain(error.slice(0, 300)) };
}
