import type { Page } from "../app/router.ts";
import { Usage } from "./usage.tsx";

export const pages: Page[] = [
  { path: "/usage", title: "Usage", view: Usage, nav: { group: "Account", key: "u" }, scope: "read" },
];
