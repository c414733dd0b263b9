// Executes machines with XState: for every state and every answer of its guards, the number of the row taken.
// Reads {xstate, machines} as JSON; each answer is a number whose bit i says whether the state's guard i holds.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const { xstate, machines } = JSON.parse(readFileSync(0, 'utf8'));
const { createMachine, transition } = createRequire(import.meta.url)(xstate);

const told = machines.map((config) => {
  const names = new Set();
  for (const state of Object.values(config.states))
    for (const row of state.on?.step ?? []) if (row.guard) names.add(row.guard);
  const guards = Object.fromEntries([...names].map((name) => [name, ({ event }) => event.holds.has(name)]));
  const machine = createMachine(config, { guards });
  const found = {};
  for (const [value, state] of Object.entries(config.states)) {
    const asked = (state.on?.step ?? []).filter((row) => row.guard).map((row) => row.guard);
    const snapshot = machine.resolveState({ value, context: {} });
    found[value] = [];
    for (let answers = 0; answers < 2 ** asked.length; answers++) {
      const event = { type: 'step', holds: new Set(asked.filter((_, i) => answers & (1 << i))) };
      const [row] = state.type === 'final' ? [] : (machine.getTransitionData(snapshot, event) ?? []);
      const [next] = transition(machine, snapshot, event);
      found[value].push([row ? row.meta.order : 0, next.value]);
    }
  }
  return found;
});
process.stdout.write(JSON.stringify(told));
