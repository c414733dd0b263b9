/** Stored runs replayed under something else: how many would go elsewhere, and which. */

import {address, el, endingName, facts, get, notice, rowName, runAddress, said, start} from './common.js';
import {filterForm, input, question, select} from './run_filters.js';
import {runCells, table} from './tables.js';

const choice = (none, names) => select([['', none], ...names.map((name) => [name, name])]);
function rows(found, {preset, policy, graph, limits}) {
  return found.map((run) => [
    ...runCells(run),
    run.error ? said(`cannot be replayed: ${run.error}`)
      : [el('a', {href: runAddress(run.id, run.seq)}, `record ${run.seq}`), ': ', rowName(run.instead), ' instead of ', rowName(run.recorded)],
    run.error ? '' : run.new_ending ? [run.ends_differently ? el('strong', {}, endingName(run.new_ending)) : endingName(run.new_ending), ` (was ${endingName(run.recorded_ending)})`]
      : said(run.unknown || 'not known'),
    run.error ? '' : el('a', {href: address('compare', {a: run.id, preset, policy, graph, limits})}, 'compare'),
  ]);
}

await start(async (main) => {
  const {presets, graphs, limits} = await get('what-if/choices');
  const names = el('datalist', {id: 'limits'}, limits.map((name) => el('option', {value: `${name}=`})));
  const limit = input('text', 'max_iterations=5');
  limit.setAttribute('list', 'limits');
  const form = filterForm('What if', 'Replay', [
    ['preset', 'Under preset', choice('as recorded', presets)], ['policy', 'With the policy of', choice('as recorded', presets)],
    ...(graphs.length ? [['graph', 'On graph', choice('as recorded', graphs)]] : []), ['limits', 'With limits', limit]]);
  const result = el('div', {'aria-live': 'polite'}), stop = el('button', {type: 'button', hidden: true}, 'Stop');
  main.append(form, names, el('p', {className: 'note'}, 'The model, the tools and people are taken to have answered as recorded until a run takes another row.'),
    el('div', {className: 'bar'}, stop), result);
  let current = 0;

  async function replay(event) {
    event?.preventDefault();
    const asked = question(form), mine = ++current;
    if (!(asked.preset || asked.policy || asked.graph || asked.limits)) {
      result.replaceChildren(el('p', {}, 'Choose a preset, a policy or limits: the runs that the filters find are replayed under them.'));
      return;
    }
    const totals = {}, changed = [], progress = el('p', {role: 'status'}), list = el('div');
    result.replaceChildren(progress, list);
    stop.hidden = false;
    try {
      for (let after = '', more = true; more && mine === current;) {
        const found = await get('what-if', {...asked, after});
        if (mine !== current) return;
        for (const [name, count] of Object.entries(found.totals)) totals[name] = (totals[name] ?? 0) + count;
        changed.push(...found.changed);
        after = found.next;
        more = Boolean(after);
        progress.replaceChildren(el('strong', {}, `${totals.end_differently} of ${totals.runs} runs would end differently.`), totals.failed ? ` ${totals.failed} cannot be replayed.` : '', more ? ' Replaying\u2026' : '');
        list.replaceChildren(
          facts([['The same in every move', String(totals.same)], ['Other moves, the same ending', String(totals.alike)],
            ['Other moves, ending not known', String(totals.unknown)], ['Cannot be replayed', String(totals.failed)]]),
          changed.length ? table(totals.failed ? 'Runs that would go elsewhere, or cannot be replayed' : 'Runs that would go elsewhere', ['status', 'what was asked', 'started', 'first difference', 'would end', 'compare'], rows(changed, asked)) : '');
      }
    } catch (error) {
      notice(error.message, 'error');
    } finally {
      if (mine === current) stop.hidden = true;
    }
  }

  form.addEventListener('submit', replay);
  form.addEventListener('reset', () => setTimeout(replay));
  stop.addEventListener('click', () => { current += 1; stop.hidden = true; });
  await replay();
});
