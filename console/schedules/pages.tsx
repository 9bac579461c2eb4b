import type { Page } from "../app/router.ts";
import { EditSchedule, NewSchedule } from "./form.tsx";
import { Schedules } from "./list.tsx";
import { Schedule } from "./schedule.tsx";

export const pages: Page[] = [
  { path: "/schedules", title: "Schedules", view: Schedules, nav: { group: "Work", key: "s" }, scope: "read" },
  { path: "/schedules/new", title: "New schedule", view: NewSchedule, scope: "execute" },
  { path: "/schedules/:id", title: "Schedule", view: Schedule, scope: "read" },
  { path: "/schedules/:id/edit", title: "Edit schedule", view: EditSchedule, scope: "execute" },
];
