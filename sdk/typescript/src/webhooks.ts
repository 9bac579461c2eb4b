import { WebhookVerificationError } from "./errors.ts";
import type { Schemas } from "./types.ts";

/** What a webhook says. Its members depend on the event; new ones may be added. */
export interface WebhookEvent {
  /** Such as execution.completed. */
  event: string;
  timestamp: string;
  /** The execution, if the event is about one. */
  trace_id?: string;
  status?: Schemas["Execution"]["status"];
  result?: Schemas["Result"];
  metadata?: Record<string, string>;
  [member: string]: unknown;
}

type HeaderList = Headers | Record<string, string | string[] | undefined>;

/**
 * Returns the body of a webhook whose signature is valid, and throws WebhookVerificationError otherwise. The body must be
 * as it arrived: parse nothing before. Headers may be those of fetch or of Node.js. The webhook may be as many seconds
 * old as tolerance says, 300 by default. A webhook may arrive twice, with the same header webhook-id.
 */
export async function verify(
  body: string | Uint8Array,
  headers: HeaderList,
  secret: string,
  { tolerance = 300 }: { tolerance?: number } = {},
): Promise<WebhookEvent> {
  const id = headerOf(headers, "webhook-id");
  const timestamp = headerOf(headers, "webhook-timestamp");
  const signatures = headerOf(headers, "webhook-signature");
  const age = Math.abs(Date.now() / 1000 - Number(timestamp));
  if (!(age <= tolerance)) {
    throw new WebhookVerificationError("the webhook's timestamp is not of the last five minutes");
  }
  const encoder = new TextEncoder();
  const content = typeof body === "string" ? encoder.encode(body) : body;
  const head = encoder.encode(`${id}.${timestamp}.`);
  const signed = new Uint8Array(head.length + content.length);
  signed.set(head);
  signed.set(content, head.length);
  const key = await crypto.subtle.importKey("raw", keyOf(secret), { name: "HMAC", hash: "SHA-256" }, false, ["verify"]);
  for (const part of signatures.split(" ")) {
    const signature = part.startsWith("v1,") ? decode(part.slice(3)) : undefined;
    // verify compares in constant time.
    if (signature && await crypto.subtle.verify("HMAC", key, signature, signed)) {
      return JSON.parse(new TextDecoder().decode(content));
    }
  }
  throw new WebhookVerificationError("the webhook has no signature with this secret");
}

function headerOf(headers: HeaderList, name: string): string {
  const lists = headers as Record<string, string | string[] | undefined>;
  const value = headers instanceof Headers
    ? headers.get(name)
    : lists[Object.keys(lists).find((given) => given.toLowerCase() === name) ?? name];
  if (typeof value !== "string") throw new WebhookVerificationError(`the webhook has no header ${name}`);
  return value;
}

/** The key is the decoded bytes of whsec_BASE64, or the characters of any other secret. */
function keyOf(secret: string): Uint8Array<ArrayBuffer> {
  if (!secret.startsWith("whsec_")) return new TextEncoder().encode(secret);
  const key = decode(secret.slice("whsec_".length));
  if (!key) throw new WebhookVerificationError("the secret is not base64 after whsec_");
  return key;
}

function decode(base64: string): Uint8Array<ArrayBuffer> | undefined {
  try {
    return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  } catch {
    return undefined;
  }
}
