/** One run: its picture, its ledger, and everything about each step; followed live. */

import {address, counted, duration, el, endingName, facts, follow, get, getText, markup, money, notice, post, runAddress, said, session, spent, start, statusBadge, time, verdict, whyAside, words} from './common.js';
import {Picture} from './picture.js';
import {stepDetail} from './step_detail.js';
import {stacked} from './tables.js';
import {VirtualList} from './virtual_list.js';

const BLOCK = 100; // moves of the ledger that are asked for together
const PAUSE_MS = 150; // after the last key before the details of a step are asked for
const CHILDREN_MS = 1500;
const PARTS = [['transcript', 'Transcript'], ['failures', 'Failures'], ['costs', 'Costs'],
  ['graph', 'The graph and its rows'], ['redactions', 'What was redacted']];
const STACKED = new Set(['decisions', 'failures', 'costs']); // whose tables have few rows, with much in each
const OPEN_UP_TO = 2000; // moves: the decisions of a longer run are read when somebody opens them

const id = new URLSearchParams(location.search).get('id') ?? '';

/** The moves of the run: all of them in short, and those that were asked for in full. */
class Ledger {
  kinds = [];
  moves = [];
  #blocks = new Map();

  constructor(changed) { this.changed = changed; }

  /** Add what is new; what is known already is sent again after a connection was lost. */
  add({from, moves, kinds_from: kindsFrom, kinds}) {
    this.kinds.push(...kinds.slice(Math.max(0, this.kinds.length - kindsFrom)));
    const added = moves.slice(Math.max(0, this.moves.length - from));
    if (added.length) this.#blocks.delete(Math.floor(this.moves.length / BLOCK));
    this.moves.push(...added.map(([seq, kind, at]) => ({seq, kind, time: at / 1000})));
    return added.length;
  }

  kind(index) { return this.kinds[this.moves[index].kind]; }

  /** A move in full, or undefined until it is there. */
  full(index) { return this.#blocks.get(Math.floor(index / BLOCK))?.[index % BLOCK]; }

  /** Ask for some moves in full. */
  want(index) {
    const number = Math.floor(index / BLOCK);
    if (this.#blocks.has(number)) return;
    const asked = [];
    this.#blocks.set(number, asked);
    get('run/moves', {run: id, start: number * BLOCK, stop: (number + 1) * BLOCK}).then(({moves}) => {
      asked.push(...moves);
      this.changed();
    }, (error) => {
      this.#blocks.delete(number);
      notice(error.message, 'error');
    });
  }

  /** The place of the move that a record belongs to. */
  moveOfRecord(seq) {
    let low = 0, high = this.moves.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.moves[middle].seq < seq) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

function summary(run, found, findings) {
  const parent = found.parent;
  return [facts([
    ['Status', statusBadge({...run, status: found.status, interrupted: found.interrupted})],
    ['Asked', run.prompt && said(run.prompt)],
    ['Asked by', run.actor && said(run.actor)],
    ['State', found.state && said(found.state)],
    ['Waits for', run.waiting && [words(run.waiting.kind), run.waiting.tool && [' ', said(run.waiting.tool)],
      run.waiting.roles.length ? ` by ${run.waiting.roles.join(' or ')}` : '', run.expires ? [' until ', time(run.expires)] : ''].flat(2)],
    ['Set aside', whyAside(run)],
    ['Started', run.started === null ? '' : [time(run.started), ' UTC']],
    ['Last record', [time(run.updated), run.started === null ? '' : `, ${duration(Math.max(0, run.updated - run.started))} later`]],
    ['Cost', spent(run)],
    ['Model', run.model && said(run.model)],
    ['Tags', run.tags.length ? run.tags.map((tag) => el('span', {className: 'tag'}, said(tag))) : ''],
    ['Metadata', run.metadata.length ? run.metadata.map((entry) => el('span', {className: 'tag'}, said(entry))) : ''],
    ['Session', run.session && said(run.session)],
    ['Graph', [said(found.graph.name), ' ', el('code', {title: found.graph.fingerprint}, found.graph.fingerprint.slice(0, 12))]],
    [parent?.seq ? 'Forked from' : 'Called by', parent && el('a', {href: runAddress(parent.run, parent.seq)}, said(parent.run), parent.seq ? ` at record ${parent.seq}` : '')],
    ['Run by', run.owner && said(run.owner)],
  ].map(([name, value]) => [name, Array.isArray(value) ? value.filter((each) => each !== '' && each !== null && each !== undefined) : value]), true),
  facts([['Answer', findings.answer], ['Verification', findings.verification], ['Under strict', findings.strict]])];
}

const tree = (runs) => el('ul', {className: 'tree'}, runs.map((run) => el('li', {},
  statusBadge(run), ' ', el('a', {href: runAddress(run.id)}, said(run.prompt || run.id)), ' ',
  el('small', {className: 'note'}, duration(Math.max(0, run.updated - run.started)), run.cost ? `, ${money(run.cost)}` : ''),
  run.runs.length ? tree(run.runs) : '')));

/** What a run would have done under a preset, in plain words. */
function underPreset(id, preset, {error, about, same, words: parts, divergences: [first] = [], ending, recorded_ending: recorded, unknown}) {
  if (error) return [said(error)];
  const compared = el('a', {href: address('compare', {a: id, preset})}, 'compare');
  const end = ending ? `It would have ended ${ending === recorded ? 'in the same way' : 'otherwise'}: ${endingName(ending)}. ` : ['How it would have ended is not known: ', said(unknown), '. '];
  if (!first) return [`${about} All ${counted(same, 'move')} would have been the same. `, end, compared].flat();
  return [`${about} `, same ? `The first ${counted(same, 'move')} would have been the same. ` : '', said(parts), ' ', end,
    el('a', {href: runAddress(id, first.seq)}, `move ${same + 1}, record ${first.seq}`), ' \u00b7 ', compared].flat();
}

/** What can be done about a run: it is compared and answered on other pages, and cancelled here. */
function actions(run, {actor, only_run: only}, cancelled) {
  const reason = el('textarea', {rows: 2});
  const form = el('form', {hidden: true, 'aria-label': 'Cancel the run', onsubmit: async (event) => {
    event.preventDefault();
    try {
      await post('inbox/cancel', {run: run.id, reason: reason.value});
      form.hidden = true;
      cancelled();
    } catch (error) {
      notice(error.message, 'error');
    }
  }}, el('label', {className: 'field'}, el('span', {className: 'name'}, 'Why'), reason), el('button', {type: 'submit', className: 'danger'}, 'Cancel the run'));
  return [el('p', {className: 'bar'},
    run.status === 'suspended' ? el('a', {href: address('inbox', {run: run.id})}, 'Answer it in the inbox') : '',
    only ? '' : el('a', {href: address('compare', {a: run.id, preset: 'strict'})}, 'How it would have gone under another preset'),
    actor && run.status !== 'finished' ? el('button', {type: 'button', onclick: () => { form.hidden = !form.hidden; reason.focus(); }}, 'Cancel the run\u2026') : ''), form];
}

await start(async (main) => {
  if (!id) throw new Error('the address names no run: open one from the list of runs');
  document.title = `Run ${id} - agentfsm`;
  const head = main.querySelector('h1');
  head.replaceChildren('Run ', el('span', {className: 'said'}, id));
  const found = await get('run', {run: id});
  if (!found.run) throw new Error('the run is not listed yet: an earlier release wrote it; rebuild_run_info lists it');

  let current = found, run = found.run, place = -1, only = '', places = null, pending = 0, shownStep = 0;
  const findings = {answer: '', verification: '', strict: ''};
  const about = el('div', {className: 'about'}, summary(run, found, findings)), live = el('p', {className: 'note live', role: 'status'});
  const visitor = await session(), doable = el('div', {});
  let doableFor = '';
  const showActions = () => {
    const status = `${run.status} ${run.parent}`;
    if (status === doableFor) return;
    doableFor = status;
    doable.replaceChildren(...(run.parent ? [] : actions(run, visitor, () => notice('Cancelled: the run ends as soon as the process that runs it, or one that has its agent, acts on it.'))));
  };
  showActions();
  const ledger = new Ledger(() => list.renew());
  const at = (which) => (places ? places[which] : which);
  const list = new VirtualList('Moves of the run', (which) => row(at(which)), (which) => go(which),
    (first, last) => { for (let which = first; which < last; which += 1) ledger.want(at(which)); });
  const picture = new Picture(id, (edge) => filter(edge));
  const slider = el('input', {type: 'range', min: 0, max: 0, value: 0, 'aria-label': 'Step through the moves of the run'});
  const where = el('output', {'aria-live': 'polite'}, 'the whole run');
  const back = el('button', {type: 'button', onclick: () => go(place - 1)}, 'Back'), on = el('button', {type: 'button', onclick: () => go(place + 1)}, 'Next');
  const rows = el('select', {onchange: () => filter(rows.value)}), keep = el('input', {type: 'checkbox', checked: found.status === 'running'});
  const detail = el('section', {className: 'detail', 'aria-label': 'Details of the move', tabIndex: 0}, el('p', {className: 'note'}, 'Choose a move to see all about it.'));
  const children = el('section', {hidden: true}, el('h2', {}, 'Sub-agents'), el('p', {className: 'note'}, 'Their cost is part of the cost of this run.'), el('div', {}));
  const parts = el('section', {}, el('h2', {}, 'More about the run'), PARTS.map(([name, title]) => part(name, title)));
  const decisions = part('decisions', 'Who allowed what');
  const follows = el('label', {hidden: found.status === 'finished'}, keep, ' Follow the run');

  function row(index) {
    const kind = ledger.kind(index), full = ledger.full(index), {seq, time: when} = ledger.moves[index];
    const no = kind.did_not_hold.length ? `did not hold: ${kind.did_not_hold.join(', ')}` : 'evaluated first';
    const outcome = full ? [words(full.outcome), full.summary && [': ', said(full.summary)], full.failure && [el('em', {}, ' \u00b7 failure '), said(full.failure)],
      full.action && [el('em', {}, ' \u00b7 action '), said(full.action)], full.left.length ? el('em', {}, ` \u00b7 left: ${full.left.map(([name, left]) => `${words(name)} ${left ?? 'no limit'}`).join(', ')}`) : '',
      full.redacted ? [' ', el('em', {className: 'redacted'}, 'redacted')] : ''].flat() : ['\u2026'];
    const clock = Number.isFinite(when) ? new Date(when * 1000).toISOString().slice(11, 19) : '';
    return [
      el('span', {className: 'number'}, String(index + 1)), el('span', {className: 'clock', title: `record ${seq}`}, clock),
      el('span', {className: 'step'}, said(kind.source), ' \u2192 ', el('b', {}, said(kind.guard)), ' \u2192 ', said(kind.target),
        kind.ends ? el('span', {className: `badge ${kind.ends === 'completed' ? 'good' : 'bad'}`}, words(kind.ends)) : ''),
      el('span', {className: 'no', title: no}, no), el('span', {className: 'outcome'}, outcome),
    ];
  }

  function go(which, details = true) {
    place = Math.min(list.count - 1, Math.max(-1, which));
    list.select(place);
    slider.value = place + 1;
    back.disabled = place < 0;
    on.disabled = place >= list.count - 1;
    clearTimeout(pending);
    if (place < 0) {
      picture.highlight('');
      where.textContent = 'the whole run';
      slider.setAttribute('aria-valuetext', where.textContent);
      return;
    }
    const index = at(place), kind = ledger.kind(index);
    picture.highlight(kind.id);
    where.textContent = `move ${index + 1} of ${ledger.moves.length}: ${kind.id} to ${kind.target}`;
    slider.setAttribute('aria-valuetext', where.textContent);
    if (details) pending = setTimeout(() => showStep(index), PAUSE_MS);
  }

  async function showStep(index, record = 0) {
    const mine = ++shownStep;
    try {
      const step = await get('run/step', {run: id, number: index + 1});
      if (mine !== shownStep) return;
      detail.replaceChildren(...stepDetail(id, step, ledger.moves.length));
      history.replaceState(null, '', `#record-${record || ledger.moves[index].seq}`);
      if (record) {
        const shown = document.getElementById(`record-${record}`);
        if (shown) {
          shown.open = true;
          shown.scrollIntoView({block: 'nearest'});
        }
      }
    } catch (error) {
      notice(error.message, 'error');
    }
  }

  function filter(edge) {
    only = edge;
    places = edge ? ledger.moves.flatMap((move, index) => (ledger.kinds[move.kind].id === edge ? [index] : [])) : null;
    list.count = places ? places.length : ledger.moves.length;
    list.renew();
    slider.max = list.count;
    rows.value = edge;
    go(edge && list.count ? 0 : -1, Boolean(edge));
    if (edge && !list.count) notice(`the run never took ${edge}`);
  }

  function listRows() {
    const counts = new Map();
    for (const move of ledger.moves) {
      const {id: edge} = ledger.kinds[move.kind];
      counts.set(edge, (counts.get(edge) ?? 0) + 1);
    }
    rows.replaceChildren(el('option', {value: ''}, 'all moves'), ...[...counts].map(([edge, count]) => el('option', {value: edge}, `${edge} (${count})`)));
    rows.value = only;
  }

  function grow(told) {
    current = {...current, ...told};
    run = told.run ?? run;
    const added = told.moves ? ledger.add(told) : 0;
    about.replaceChildren(...summary(run, current, findings));
    showActions();
    follows.hidden = current.status === 'finished';
    if (!added) return;
    if (places) places.push(...ledger.moves.slice(-added).flatMap((move, place) => (ledger.kinds[move.kind].id === only ? [ledger.moves.length - added + place] : [])));
    list.count = places ? places.length : ledger.moves.length;
    list.renew();
    slider.max = list.count;
    if (keep.checked) {
      if (place >= 0) go(list.count - 1);
      else list.showEnd();
    }
    on.disabled = place >= list.count - 1;
    listRows();
    picture.draw();
  }

  let childrenWanted = 0;
  async function showChildren() {
    const {runs} = await get('run/children', {run: id});
    children.hidden = !runs.length;
    children.lastElementChild.replaceChildren(tree(runs));
  }

  function part(name, title) {
    const box = el('div', {}, el('p', {className: 'note'}, 'Reading\u2026'));
    const made = el('details', {'data-part': name, ontoggle: async () => {
      if (!made.open) return;
      try {
        box.replaceChildren(...markup(await getText('run/part', {run: id, name})));
        if (STACKED.has(name)) box.querySelectorAll('table').forEach(stacked);
      } catch (error) {
        box.replaceChildren(el('p', {}, error.message));
      }
    }}, el('summary', {}, title), box);
    return made;
  }

  ledger.add(found);
  main.append(about, doable, live, decisions,
    el('div', {className: 'panes run'},
      el('section', {className: 'pane', 'aria-label': 'Picture'}, el('h2', {}, 'The path of the run'), picture.element),
      el('section', {className: 'pane', 'aria-label': 'Ledger'}, el('h2', {}, 'Ledger of moves'),
        el('div', {className: 'steps'}, back, slider, on, where),
        el('div', {className: 'bar'}, el('label', {}, 'Only row ', rows), follows,
          el('button', {type: 'button', onclick: () => { filter(''); detail.replaceChildren(); }}, 'The whole run')),
        list.element, detail)),
    children, parts);
  list.count = ledger.moves.length;
  slider.max = list.count;
  go(-1);
  listRows();
  performance.mark('run-shown');
  const drawn = picture.draw();

  const toRecord = () => {
    const seq = Number(/^#record-(\d+)$/.exec(location.hash)?.[1] ?? 0);
    if (!seq || !ledger.moves.length) return;
    if (places) filter('');
    const index = ledger.moveOfRecord(seq);
    keep.checked = false;
    go(index, false);
    showStep(index, seq);
  };
  addEventListener('hashchange', toRecord);
  slider.addEventListener('input', () => go(Number(slider.value) - 1));
  addEventListener('keydown', (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey || event.target.closest('input, select, textarea, .scroll')) return;
    event.preventDefault();
    go(place + step);
  });
  toRecord();
  const short = ledger.moves.length <= OPEN_UP_TO;
  decisions.open = short;

  /** What takes a whole run to find out: its answer, whether it is intact, and how it would have gone under the preset strict. */
  async function find(name, ask) {
    findings[name] = el('span', {className: 'note'}, 'reading\u2026');
    about.replaceChildren(...summary(run, current, findings));
    findings[name] = await ask().catch((error) => said(error.message));
    about.replaceChildren(...summary(run, current, findings));
  }
  const showAnswer = () => find('answer', async () => markup(await getText('run/part', {run: id, name: 'answer'})));
  const verify = () => find('verification', async () => verdict(id, await get('verification/run', {run: id})));
  const replay = () => find('strict', async () => underPreset(id, 'strict', await get('compare/replay', {a: id, preset: 'strict'})));
  let foundFor = run.status;
  const findAll = () => Promise.all([run.ending === 'completed' && showAnswer(), ...(visitor.only_run ? [] : [verify(), replay()])]);
  const onDemand = (text, work) => el('button', {type: 'button', onclick: work}, text);
  follow('run/events', {run: id, from: `${found.seq}-${found.moves.length}-${found.kinds.length}`}, (told) => {
    grow(told);
    clearTimeout(childrenWanted);
    childrenWanted = setTimeout(() => {
      if (decisions.open) decisions.dispatchEvent(new Event('toggle'));
      showChildren().catch(() => {});
      if (short && run.status !== foundFor) {
        foundFor = run.status;
        findAll();
      }
    }, CHILDREN_MS);
  }, (lost) => { live.textContent = lost ? 'the viewer cannot be reached; trying again' : current.status === 'running' ? 'live' : ''; });
  await Promise.all([drawn, showChildren(), short && findAll()]);
  if (!short && !visitor.only_run) {
    Object.assign(findings, {verification: onDemand('Verify', verify), strict: onDemand('Replay', replay)});
    about.replaceChildren(...summary(run, current, findings));
  }
});
