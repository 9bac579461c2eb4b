// The person or key that is signed in.
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Caller } from "../api/schema.ts";

export const Session = createContext<Caller | null>(null);

// useSession returns the caller. Pages are shown only when someone is signed in.
export function useSession(): Caller {
  return useContext(Session)!;
}

// useMay reports whether the caller has a scope. The server checks it again.
export function useMay(scope: Caller["scopes"][number]): boolean {
  return useSession().scopes.includes(scope);
}
