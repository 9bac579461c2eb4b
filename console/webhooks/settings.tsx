// The webhook settings of an API key.
import { useState } from "preact/hooks";
import { type ApiError, call } from "../api/client.ts";
import type { DeliveryAttempt, Webhook, WebhookRequest, WebhookRotation } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { useMay, useSession } from "../app/session.ts";
import { Action, Opener, Secret } from "../ui/action.tsx";
import { Form } from "../ui/form.tsx";
import { Empty, Facts, Failure, Name, Section, Time } from "../ui/text.tsx";
import { Attempt } from "./delivery.tsx";

const absent = (error: ApiError | undefined) => error?.status === 404;

// Settings shows the settings of the caller's key or, for administrators, of the key with an id.
export function Settings({ of: key }: { of: string | undefined }) {
  const { value, error, reload } = useLive((signal) => call("getWebhook", { key }, signal), [key ?? ""]);
  const w = absent(error) ? undefined : value;
  const { name } = useSession();
  const mayChange = useMay("execute") || useMay("admin");
  const [secret, setSecret] = useState<string>();
  const [tested, setTested] = useState<DeliveryAttempt>();
  const done = (w: Webhook, close: () => void) => (setSecret(w.secret), reload(), close());
  const put = (close: () => void) => (
    <Form
      schema="WebhookRequest"
      label="Set"
      submit={async (body) => done(await call("putWebhook", { key, body: body as WebhookRequest }), close)} />
  );
  return (
    <Section
      title={`Settings of the key ${key ?? name}`}
      actions={mayChange && w && (
        <>
          <Action run={() => call("testWebhook", { key }).then(setTested)} disabled={!w.url}>Send test</Action>
          <Opener label="Edit" title="Edit the webhook settings">
            {(close) => (
              <Form
                schema="WebhookRequest"
                hidden={["secret"]}
                value={{ ...w }}
                label="Save"
                submit={async ({ secret: _, ...body }) =>
                  done(await call("patchWebhook", { key, body: body as WebhookRequest }), close)} />
            )}
          </Opener>
          <Opener label="Rotate secret">
            {(close) => (
              <Form
                schema="WebhookRotation"
                label="Rotate"
                submit={async (body) =>
                  done(await call("rotateWebhook", { key, body: body as WebhookRotation }), close)} />
            )}
          </Opener>
          <Action
            danger
            confirm="Remove the settings with their secrets? Pending deliveries are then sent unsigned."
            run={() =>
              call("deleteWebhook", { key }).then(() => (setSecret(undefined), setTested(undefined), reload()))}>
            Remove
          </Action>
        </>
      )}>
      {!absent(error) && <Failure of={error} />}
      {secret && <Secret label="The signing secret of webhooks." value={secret} />}
      {absent(error) && (
        <>
          <Empty command="bullpen key webhook set https://ci.example.com/hooks/bullpen">
            This key has no webhook. Only executions with a webhook_url send one.
          </Empty>
          {mayChange && (
            <div class="actions">
              <Opener label="Set webhook" primary>{put}</Opener>
            </div>
          )}
        </>
      )}
      {w && (
        <Facts
          of={[
            ["URL", w.url ? <Name>{w.url}</Name> : "none"],
            ["Maximum attempts", w.max_attempts],
            ["Waits between attempts", w.waits.map((s) => `${s} s`).join(", ")],
            ["Timeout per attempt", `${w.timeout} s`],
            ["Signature headers", <Name>{["Webhook-Signature", ...w.signature_headers].join(", ")}</Name>],
            ["Secret", w.secret_hint ? <code>{w.secret_hint}</code> : "none: webhooks are unsigned"],
            [
              "Previous secret",
              w.old_secret_until
                ? (
                  <>
                    <code>{w.old_secret_hint}</code> until <Time at={w.old_secret_until} />
                  </>
                )
                : undefined,
            ],
            ["Updated", <Time at={w.updated_at} />],
          ]} />
      )}
      {tested && (
        <Section title="Test delivery">
          <Attempt of={tested} open />
        </Section>
      )}
    </Section>
  );
}
