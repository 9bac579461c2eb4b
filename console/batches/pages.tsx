import type { Page } from "../app/router.ts";
import { Batch } from "./batch.tsx";
import { Batches } from "./list.tsx";
import { NewBatch } from "./new.tsx";

export const pages: Page[] = [
  { path: "/batches", title: "Batches", view: Batches, nav: { group: "Work", key: "b" }, scope: "read" },
  { path: "/batches/new", title: "New batch", view: NewBatch, scope: "execute" },
  { path: "/batches/:id", title: "Batch", view: Batch, scope: "read" },
];
