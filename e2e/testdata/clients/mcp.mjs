// The official TypeScript client of the Model Context Protocol against a server. Any deviation is an
// exception.
import assert from "node:assert/strict";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";

const { BULLPEN_URL: url, BULLPEN_API_KEY: key, BULLPEN: bullpen } = process.env;
const headers = { Authorization: `Bearer ${key}` };

async function record(id) {
  const answer = await fetch(`${url}/v1/executions/${id}?wait=30`, { headers });
  return answer.json();
}

async function check(transport) {
  const client = new Client({ name: "e2e", version: "1" });
  await client.connect(transport);
  const { tools } = await client.listTools(); // from now on the client validates results against their schemas
  assert.deepEqual(tools.map((t) => t.name).sort(), ["files_download", "files_list", "files_upload", "sandbox_execute"]);

  const progress = [];
  const result = await client.callTool(
    { name: "sandbox_execute", arguments: { code: "echo one; sleep 0.3; echo two; exit 3", language: "bash", thread_id: "ts-client" } },
    undefined,
    { onprogress: (p) => progress.push(p.message) },
  );
  assert.ok(!result.isError);
  assert.equal(result.structuredContent.stdout, "one\ntwo\n");
  assert.equal(result.structuredContent.exit_code, 3);
  assert.ok(progress.join("").startsWith("one\n"), `progress ${JSON.stringify(progress)}`);

  const refused = await client.callTool({ name: "sandbox_execute", arguments: { code: "1", timeout: 0 } });
  assert.ok(refused.isError && refused.content[0].text.includes("timeout"));

  const upload = await client.callTool({ name: "files_upload", arguments: { source: "thread", id: "ts-client", path: "in.txt", content_length: 2 } });
  const { url: to, method, headers: list } = upload.structuredContent;
  const sent = await fetch(to, { method, body: "hi", headers: Object.fromEntries(list.filter((h) => h.name !== "Content-Length").map((h) => [h.name, h.value])) });
  assert.equal(sent.status, 200);
  const listed = await client.callTool({ name: "files_list", arguments: { source: "thread", id: "ts-client" } });
  assert.deepEqual(listed.structuredContent.files.map((f) => f.name), ["in.txt"]);
  const download = await client.callTool({ name: "files_download", arguments: { source: "thread", id: "ts-client", path: "in.txt" } });
  assert.equal(await (await fetch(download.structuredContent.url)).text(), "hi");

  // Cancelled by the client: the program ends.
  const controller = new AbortController();
  let started;
  const id = new Promise((resolve) => (started = resolve));
  const call = client.callTool(
    { name: "sandbox_execute", arguments: { code: "echo $BULLPEN_TRACE_ID; sleep 3600", language: "bash", timeout: 3600 } },
    undefined,
    { signal: controller.signal, onprogress: (p) => p.message && started(p.message.trim()), timeout: 600_000 },
  );
  const trace = await id;
  controller.abort("enough");
  await assert.rejects(call);
  assert.equal((await record(trace)).status, "cancelled");
  await fetch(`${url}/v1/threads/ts-client`, { method: "DELETE", headers });
  await client.close();
}

await check(new StreamableHTTPClientTransport(new URL(`${url}/mcp`), { requestInit: { headers } }));
await check(new StdioClientTransport({ command: bullpen, args: ["mcp"], env: { ...process.env } }));
console.log("ok");
