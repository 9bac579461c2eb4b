import type { ComponentChildren } from "preact";
import { link, useLocation, useParam } from "../app/router.ts";

export type Tab = [name: string, view: () => ComponentChildren];

// Tabs shows one of several views. The parameter tab of the page's address names it.
export function Tabs({ of }: { of: Array<Tab | false | undefined> }) {
  const tabs = of.filter((t): t is Tab => Boolean(t));
  const { path } = useLocation();
  const [name] = useParam("tab", tabs[0][0]);
  const open = tabs.find((t) => t[0] === name) ?? tabs[0];
  return (
    <>
      <div class="tabs" role="group" aria-label="Sections of this page">
        {tabs.map((t, i) => (
          <a key={t[0]} href={link(path, { tab: i ? t[0] : "" })} aria-current={t === open ? "true" : undefined}>
            {t[0]}
          </a>
        ))}
      </div>
      {open[1]()}
    </>
  );
}
