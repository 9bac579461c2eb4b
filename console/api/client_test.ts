import assert from "node:assert/strict";
import { at } from "../agent_sessions/api.ts";
import { address, signedURL } from "./client.ts";

Deno.test("no id leads to the address of another route", () => {
  for (const id of [".", "..", "../admin", "%2e%2e", "a/b", "?x", "#x", "\\", "//evil.example", "__proto__", "$&"]) {
    const url = address("cancelExecution", { id });
    assert.match(url.pathname, /^\/v1\/executions\/[^/]+\/cancel$/, id);
    assert.equal(url.origin + url.search + url.hash, location.origin, id);
    assert.match(at("sessions", id, "terminate").pathname, /^\/sandbox-agent\/v1\/sessions\/[^/]+\/terminate$/, id);
  }
});

Deno.test("signed URLs lead to the server by the proxy of the page", () => {
  const url = signedURL("http://127.0.0.1:8080/v1/files/content/abc_-1");
  assert.equal(url.href, location.origin + "/v1/files/content/abc_-1");
});
