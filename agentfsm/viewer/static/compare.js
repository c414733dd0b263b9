/** Two runs, or a run and what it would have done under other settings: where they part, in the ledger and in the picture. */

import {address, counted, el, endingName, facts, get, getText, markup, notice, rowName, runAddress, said, start, statusBadge, words} from './common.js';
import {layout, reveal, wholeButton} from './picture.js';
import {field, input, select} from './run_filters.js';
import {table} from './tables.js';

const DIFFERENCES = {
  move: 'From here on they take different rows.',
  outcome: 'They take the same row here, on something else that the model, a tool or a person said.',
  '': 'They are the same in every move.',
};

const SETTINGS = ['preset', 'policy', 'graph', 'limits'];

function compareForm({presets, graphs}) {
  const named = (names) => names.map((name) => [name, name]);
  return el('form', {className: 'filters', 'aria-label': 'What to compare'}, el('div', {className: 'fields'},
    field('a', 'Run', Object.assign(input('text', 'its id, or the beginning'), {required: true})), field('b', 'With run', input('text')),
    field('preset', 'or with itself under', select([['', 'no preset'], ...named(presets)])),
    field('policy', 'with the policy of', select([['', 'as recorded'], ...named(presets)])),
    graphs.length ? field('graph', 'on graph', select([['', 'as recorded'], ...named(graphs)])) : '',
    field('limits', 'with limits', input('text', 'max_iterations=5')),
    el('button', {type: 'submit'}, 'Compare')));
}

const link = (run) => el('a', {href: runAddress(run.id)}, el('code', {}, run.id));

/** The moves of a run around the first difference, which is marked. */
const moves = (name, rows, same) => table(name, ['move', 'row', 'guards that did not hold', 'on what'],
  rows.map((row) => [
    row.number === same + 1 ? el('strong', {}, `${row.number} (first difference)`) : String(row.number),
    rowName(`${row.source}.${row.guard} -> ${row.target}`),
    said(row.tried.filter(([, answer]) => answer !== 'held').map(([name]) => name).join(', ')),
    [said(words(row.outcome)), row.summary ? [': ', said(row.summary)] : [], row.failure ? [' ', said(row.failure)] : [], row.ends ? ` (ends: ${words(row.ends)})` : ''].flat(),
  ]));

/** The picture of a run up to its move after those that it has in common, with that row highlighted. */
function picture(run, same, row) {
  const box = el('div', {className: 'scroll', role: 'region', 'aria-label': `Picture of run ${run.id} up to the difference`, tabIndex: 0});
  getText('compare/picture', {run: run.id, moves: same + (row ? 1 : 0), layout: layout()}).then((text) => {
    const svg = markup(text, 'image/svg+xml')[0];
    const id = row && `${row.source}.${row.guard}`;
    for (const each of svg.querySelectorAll('[data-edge]')) if (each.dataset.edge.split(' ').includes(id)) each.classList.add('now');
    box.replaceChildren(svg);
    reveal(box, svg.querySelector('g.now'));
  }).catch((error) => box.replaceChildren(el('p', {}, error.message)));
  const figure = el('figure', {className: 'picture'}, box);
  figure.append(wholeButton(figure), el('figcaption', {className: 'note'},
    row ? 'The path up to the first difference, and the row that was then taken.' : 'The whole path.'));
  return figure;
}

const pane = (title, run, rows, same) => {
  const row = rows.find((each) => each.number === same + 1);
  return el('section', {className: 'pane'}, el('h2', {}, title, ' ', link(run), ' ', run.status ? statusBadge(run) : ''),
    moves(`Moves of ${run.id}`, rows, same), picture(run, same, row));
};

async function showRuns(result, asked) {
  const found = await get('compare', asked);
  const shorter = found.moves.a - found.starts.a < found.moves.b - found.starts.b ? found.a : found.b;
  result.replaceChildren(
    el('p', {role: 'status'}, el('strong', {}, `They have ${counted(found.starts.a + found.starts.b + found.same, 'move')} in common. `),
      ...(found.what === 'end' ? ['Run ', said(shorter.id), ' has no move after these.'] : [DIFFERENCES[found.what]])),
    facts([['Moves', `${found.moves.a} and ${found.moves.b}`]]),
    ...(found.graphs ? [el('details', {}, el('summary', {}, 'They follow different graphs'), el('pre', {className: 'said'}, found.graphs))] : []),
    el('div', {className: 'panes'}, ...['a', 'b'].map((name) => pane('Run', found[name], found.window[name], found.starts[name] + found.same))));
}

async function showReplay(result, asked) {
  const found = await get('compare/replay', asked);
  if (found.error) {
    result.replaceChildren(el('p', {className: 'failed', role: 'status'}, said(found.error)));
    return;
  }
  const ending = found.ending ? `It would end: ${endingName(found.ending)}` : 'How it would end is not known';
  result.replaceChildren(
    el('p', {role: 'status'}, el('strong', {}, found.divergences.length
      ? `Under ${found.settings}, the first ${counted(found.same, 'move')} are the same.` : `Under ${found.settings}, every move is the same.`)),
    ...[found.about, found.words].filter(Boolean).map((text) => el('p', {}, said(text))),
    facts([
      ['Recorded ending', found.recorded_ending ? endingName(found.recorded_ending) : 'none yet'],
      ['Under these settings', [ending, found.unknown ? [': ', said(found.unknown)] : ''].flat()],
    ]),
    found.divergences.length
      ? table('Every move that would be another', ['record', 'recorded', 'instead'],
        found.divergences.map((each) => [el('a', {href: runAddress(found.a.id, each.seq)}, String(each.seq)),
          rowName(each.recorded), rowName(each.instead)]))
      : '',
    el('div', {className: 'panes'}, pane('As recorded: run', found.a, found.window.a, found.same)));
}

await start(async (main) => {
  const form = compareForm(await get('compare/presets'));
  const result = el('div', {'aria-live': 'polite'});
  main.append(form, result);
  const given = new URLSearchParams(location.search);
  const names = ['a', 'b', ...SETTINGS].filter((name) => form.elements[name]);
  for (const name of names) form.elements[name].value = given.get(name) ?? '';

  async function compare(event) {
    event?.preventDefault();
    const asked = Object.fromEntries(names.map((name) => [name, form.elements[name].value.trim()]));
    history.replaceState(null, '', address('compare', asked));
    if (!asked.b && !SETTINGS.some((name) => asked[name])) {
      notice('name a second run, or choose a preset, a policy or limits', 'error');
      return;
    }
    await (asked.b ? showRuns(result, {a: asked.a, b: asked.b}) : showReplay(result, asked))
      .catch((error) => notice(error.message, 'error'));
  }
  form.addEventListener('submit', compare);
  if (form.elements.a.value) await compare();
  else result.append(el('p', {}, 'Name a run, and another one, such as its fork, or a preset under which it is replayed.'));
});
