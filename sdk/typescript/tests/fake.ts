/** A server of a few lines, whose connections break where a test wants it. */
import { createServer, type Socket } from "node:net";

export interface Request {
  method: string;
  path: string;
  headers: Record<string, string>;
  body: string;
}

export interface Answer {
  status?: number;
  headers?: Record<string, string>;
  body?: string | Uint8Array;
}

/** A server that answers each connection once. */
export class FakeServer {
  url = "";
  readonly requests: Request[] = [];
  /** After how many bytes the first answers break off, undefined for whole ones. All further answers are whole. */
  readonly cuts: (number | undefined)[] = [];
  /** The whole answers. */
  readonly answers: Uint8Array[] = [];
  readonly #answer: (request: Request) => Answer;
  readonly #sockets = new Set<Socket>();
  readonly #server = createServer((socket) => this.#serve(socket));

  constructor(answer: (request: Request) => Answer) {
    this.#answer = answer;
  }

  /** Listens on a port, 0 for a free one. */
  async listen(port = 0): Promise<this> {
    await new Promise<void>((resolve) => this.#server.listen(port, "127.0.0.1", resolve));
    this.url = `http://127.0.0.1:${(this.#server.address() as { port: number }).port}`;
    return this;
  }

  async close(): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    await new Promise((resolve) => this.#server.close(resolve));
  }

  #serve(socket: Socket): void {
    this.#sockets.add(socket);
    socket.on("close", () => this.#sockets.delete(socket));
    socket.on("error", () => {});
    let received = "";
    socket.on("data", (data) => {
      received += data.toString("latin1");
      const request = parse(received);
      if (!request) return;
      this.requests.push(request);
      const bytes = encode(this.#answer(request));
      const cut = this.cuts.shift();
      this.answers.push(bytes);
      const sent = bytes.subarray(0, cut);
      socket.write(sent, () => cut === undefined ? socket.end() : socket.destroy());
    });
  }
}

function parse(received: string): Request | undefined {
  const [head = "", body] = received.split("\r\n\r\n", 2);
  if (body === undefined) return undefined;
  const [line = "", ...rest] = head.split("\r\n");
  const headers = Object.fromEntries(rest.map((header) => {
    const colon = header.indexOf(":");
    return [header.slice(0, colon).toLowerCase(), header.slice(colon + 1).trim()];
  }));
  if (body.length < Number(headers["content-length"] ?? 0)) return undefined;
  const [method = "", path = ""] = line.split(" ");
  return { method, path, headers, body };
}

/** Returns an answer as it is sent: in chunks, unless it has a length. */
function encode(answer: Answer): Uint8Array {
  const { status = 200, headers = {}, body = "" } = answer;
  const bytes = typeof body === "string" ? new TextEncoder().encode(body) : body;
  const lines = Object.entries({ Connection: "close", ...headers }).map(([name, value]) => `${name}: ${value}\r\n`);
  const encoder = new TextEncoder();
  const head = `HTTP/1.1 ${status} X\r\n${lines.join("")}`;
  if (headers["Content-Length"]) return Uint8Array.from([...encoder.encode(`${head}\r\n`), ...bytes]);
  const parts: Uint8Array[] = [encoder.encode(`${head}Transfer-Encoding: chunked\r\n\r\n`)];
  const size = 19; // so that chunks end within lines and within characters
  for (let at = 0; at < bytes.length; at += size) {
    const chunk = bytes.subarray(at, at + size);
    parts.push(encoder.encode(`${chunk.length.toString(16)}\r\n`), chunk, encoder.encode("\r\n"));
  }
  parts.push(encoder.encode("0\r\n\r\n"));
  return Uint8Array.from(parts.flatMap((part) => [...part]));
}
