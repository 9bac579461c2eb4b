// The console, for tenants and operators. Each folder has the pages of one kind of object, named as in the API.
import { render } from "preact";
import { pages as admin } from "./admin/pages.tsx";
import { pages as agentSessions } from "./agent_sessions/pages.tsx";
import { App } from "./app/app.tsx";
import { pages as batches } from "./batches/pages.tsx";
import { pages as executions } from "./executions/pages.tsx";
import { pages as overview } from "./overview/pages.tsx";
import { pages as pipelines } from "./pipelines/pages.tsx";
import { pages as sandboxes } from "./sandboxes/pages.tsx";
import { pages as schedules } from "./schedules/pages.tsx";
import { pages as storage } from "./storage/pages.tsx";
import { pages as threads } from "./threads/pages.tsx";
import { pages as usage } from "./usage/pages.tsx";
import { pages as webhooks } from "./webhooks/pages.tsx";

// In the order of the navigation.
const pages = [
  ...overview,
  ...executions,
  ...batches,
  ...schedules,
  ...pipelines,
  ...sandboxes,
  ...agentSessions,
  ...threads,
  ...storage,
  ...webhooks,
  ...usage,
  ...admin,
];

render(<App pages={pages} />, document.getElementById("app")!);
