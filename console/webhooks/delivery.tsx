import { useState } from "preact/hooks";
import { address, call, send } from "../api/client.ts";
import type { DeliveryAttempt, DeliveryRequest } from "../api/schema.ts";
import { useLive, usePolling } from "../app/live.ts";
import { useMay } from "../app/session.ts";
import { Action } from "../ui/action.tsx";
import { duration, Facts, Failure, Name, Section, Status, Time } from "../ui/text.tsx";

// Delivery shows the webhook of an execution with the request and the response of each attempt.
export function Delivery({ id }: { id: string }) {
  const delivery = useLive((signal) => call("getDelivery", { id }, signal), [id], "executions");
  const { value: d, error, reload } = delivery;
  usePolling(5000, ...d?.status === "pending" ? [delivery] : []); // the stream of changes does not report deliveries
  const mayExecute = useMay("execute");
  return (
    <Section
      title="Webhook"
      actions={mayExecute && d && d.status !== "pending" && (
        <Action run={() => call("replayDelivery", { id }).then(reload)} done="The webhook is being sent again.">
          Replay
        </Action>
      )}>
      <Failure of={error} />
      {d && (
        <Facts
          of={[
            ["URL", <Name>{d.url}</Name>],
            ["Status", <Status of={d.status} />],
            ["ID", <code>{d.webhook_id}</code>],
            ["Attempts", d.attempts_made],
            ["Next attempt", d.next_at ? <Time at={d.next_at} /> : undefined],
            ["Reason", d.reason ?? undefined],
          ]} />
      )}
      {d?.attempts.map((a) => <Attempt key={a.number} of={a} open={a.number === d.attempts_made} />)}
      {d?.created_at && <Body id={id} />}
    </Section>
  );
}

// Body shows on request the body that each attempt sends.
function Body({ id }: { id: string }) {
  const [text, setText] = useState<string>();
  const read = async () => setText(await (await send("GET", address("getDeliveryBody", { id }))).text());
  return text === undefined
    ? (
      <div class="actions">
        <Action run={read}>Show body</Action>
      </div>
    )
    : <Text label="Body" of={text} />;
}

// Attempt shows the request and the response of one attempt.
export function Attempt({ of: a, open }: { of: DeliveryAttempt; open?: boolean }) {
  return (
    <details open={open}>
      <summary>
        {a.number}. <Time at={a.at} /> <Status of={a.error ? "failed" : "delivered"} />:{" "}
        <Name>{String(a.status ?? a.error)}</Name> after {duration(a.timings.total_ms)}
      </summary>
      <Facts
        of={[
          ["Remote address", a.remote_addr],
          ["Detail", a.detail ? <Name>{a.detail}</Name> : undefined],
          ["DNS", duration(a.timings.dns_ms)],
          ["Connect", duration(a.timings.connect_ms)],
          ["TLS", duration(a.timings.tls_ms)],
          ["First byte", duration(a.timings.first_byte_ms)],
        ]} />
      <div class="columns">
        {a.request && <Text label="Request headers" of={headers(a.request)} />}
        {a.response !== null && <Text label="Response" of={a.response.replaceAll("\r\n", "\n")} />}
      </div>
    </details>
  );
}

const headers = (r: DeliveryRequest) =>
  Object.entries(r.headers).map(([name, value]) => `${name}: ${value}`).join("\n");

function Text({ label, of }: { label: string; of: string }) {
  return (
    <div>
      <p class="faint">{label}</p>
      <pre class="file" tabIndex={0} aria-label={label}><Name>{of}</Name></pre>
    </div>
  );
}
