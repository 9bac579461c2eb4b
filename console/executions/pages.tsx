import type { Page } from "../app/router.ts";
import { Execution } from "./execution.tsx";
import { Executions } from "./list.tsx";
import { Run } from "./run.tsx";

export const pages: Page[] = [
  { path: "/run", title: "Run", view: Run, nav: { group: "Work", key: "r" }, scope: "execute" },
  { path: "/executions", title: "Executions", view: Executions, nav: { group: "Work", key: "e" }, scope: "read" },
  { path: "/executions/:id", title: "Execution", view: Execution, scope: "read" },
];
