import type { Page } from "../app/router.ts";
import { Pipelines } from "./list.tsx";
import { NewPipeline } from "./new.tsx";
import { Pipeline } from "./pipeline.tsx";

export const pages: Page[] = [
  { path: "/pipelines", title: "Pipelines", view: Pipelines, nav: { group: "Work", key: "p" }, scope: "read" },
  { path: "/pipelines/new", title: "Run pipeline", view: NewPipeline, scope: "execute" },
  { path: "/pipelines/:id", title: "Pipeline", view: Pipeline, scope: "read" },
];
