import type { Page } from "../app/router.ts";
import { Audit, AuditRecord } from "./audit.tsx";
import { DeadLetter, DeadLetters } from "./deadletters.tsx";
import { pagesOf } from "./kind.tsx";
import { images, keys, members, orgs, plans, profiles, secrets, sessions } from "./kinds.tsx";
import { Queue } from "./queue.tsx";
import { Worker, Workers } from "./workers.tsx";

const group = "Administration";
const own = { nav: { group }, scope: "admin" } as const;

export const pages: Page[] = [
  { path: "/admin/workers", title: "Workers", view: Workers, ...own, nav: { group, key: "w" }, global: true },
  { path: "/admin/workers/:name", title: "Worker", view: Worker, scope: "admin", global: true },
  { path: "/admin/queue", title: "Queue", view: Queue, ...own },
  ...pagesOf(orgs),
  ...pagesOf(plans),
  ...pagesOf(profiles),
  ...pagesOf(images),
  ...pagesOf(keys),
  ...pagesOf(members),
  ...pagesOf(sessions),
  ...pagesOf(secrets),
  { path: "/admin/dead-letters", title: "Dead letters", view: DeadLetters, ...own, global: true },
  { path: "/admin/dead-letters/:id", title: "Dead letter", view: DeadLetter, scope: "admin", global: true },
  { path: "/admin/audit", title: "Audit", view: Audit, ...own },
  { path: "/admin/audit/:sequence", title: "Audit record", view: AuditRecord, scope: "admin" },
];
