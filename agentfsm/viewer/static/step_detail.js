/** Everything about one move: the prompt as sent, reply, calls, failure, lessons, budgets, and its records. */

import {block, duration, el, facts, get, isRedacted, json, money, redacted, runAddress, said, time, words} from './common.js';

const text = (value) => (isRedacted(value) ? redacted() : said(value));

export function message(one, label = '') {
  const names = {user: 'user', assistant: 'model', tool: 'tool', system: 'user'};
  return el('li', {className: names[one.role] ?? 'other'},
    el('b', {}, words(one.role ?? '')), one.name ? [' ', text(one.name)] : '', one.failed ? [' ', el('em', {}, 'failed')] : '',
    label ? [' ', el('small', {}, label)] : '', block(one.content),
    one.calls.map((call) => el('div', {}, 'calls ', text(call.name), json(call.arguments))),
    one.images ? el('div', {}, `${one.images} image${one.images === 1 ? '' : 's'}, not shown`) : '');
}

function prompt(run, number, found) {
  const list = el('ol', {className: 'transcript'});
  const add = (messages, start) => messages.map((one, place) => {
    const at = start + place;
    return message(one, `${at + 1} of ${found.total}${at >= found.before ? ', new in this request' : ''}`);
  });
  list.append(...add(found.messages, found.start));
  let start = found.start;
  const earlier = el('button', {type: 'button', onclick: async () => {
    const stop = start;
    start = Math.max(0, start - 50);
    const more = await get('run/prompt', {run, number, start, stop});
    list.prepend(...add(more.messages, start));
    label();
  }});
  const label = () => {
    earlier.hidden = start === 0;
    earlier.textContent = `Show earlier messages (${start} more)`;
  };
  label();
  return [el('p', {className: 'note'}, `${found.total} messages, as they were sent; the definitions of tools are not in a journal.`), earlier, list];
}

function call(run, one) {
  const status = el('span', {className: `badge ${one.status === 'done' ? 'good' : 'bad'}`}, words(one.status));
  return el('li', {className: 'tool'}, el('b', {}, text(one.name ?? 'a tool')), ' ', status,
    one.attempt > 1 ? ` attempt ${one.attempt}` : '', ' ', el('small', {}, recordLink(run, one.seq)),
    one.arguments ? [el('div', {className: 'note'}, 'arguments'), json(one.arguments)] : '',
    one.result !== undefined ? [el('div', {className: 'note'}, 'result'), block(one.result)] : '',
    one.error ? [el('div', {className: 'note'}, 'failure'), json(one.error)] : '',
    one.run_id ? el('div', {}, 'by the run of a sub-agent: ', el('a', {href: runAddress(one.run_id)}, said(one.run_id))) : '',
    one.images ? el('div', {}, `${one.images} images, not shown`) : '');
}

const recordLink = (run, seq) => el('a', {href: runAddress(run, seq)}, `record ${seq}`);

function triedGuards(move) {
  const no = move.tried.filter(([, answer]) => answer !== 'held');
  return [
    no.length ? el('ol', {className: 'guards'}, no.map(([name, answer]) => el('li', {}, said(name), answer === 'raised' ? el('em', {}, ' raised an error') : ''))) : 'none',
  ];
}

function record(run, one) {
  return el('details', {id: `record-${one.seq}`, className: 'record'},
    el('summary', {}, `record ${one.seq}: ${one.kind}`, one.redacted ? [' ', redacted()] : ''),
    facts([['Time', time(one.time)], ['Lease', `epoch ${one.epoch}`], ['Hash', el('code', {}, one.hash)],
      ['Link', el('a', {href: runAddress(run, one.seq)}, `#record-${one.seq}`)]]),
    json(one.data));
}

function section(title, ...content) {
  return el('section', {}, el('h3', {}, title), ...content);
}

/**
 * The details of a move.
 *
 * @param {string} run The run.
 * @param {object} found What the server says about the move.
 * @param {number} total How many moves the run has.
 */
export function stepDetail(run, found, total) {
  const {move} = found;
  const parts = [
    facts([
      ['Row', [el('b', {}, said(`${move.source}.${move.guard}`)), ' to ', said(move.target)]],
      ['Did not hold', triedGuards(move)],
      ['Outcome', [words(move.outcome), move.redacted ? [' ', redacted()] : ''].flat()],
      ['Ends the run', move.ends && words(move.ends)],
      ['Action', move.action && said(move.action)],
      ['Time', [time(move.time), move.seconds ? `, took ${duration(move.seconds)}` : '']],
      ['Record', [recordLink(run, move.seq), ' ', el('code', {className: 'hash'}, move.hash)]],
    ]),
  ];
  if (found.failure) parts.push(section('Failure', json(found.failure)));
  if (found.recovery) parts.push(section('Recovery', json(found.recovery)));
  if (found.request) parts.push(section('Asks a person', json(found.request)));
  if (found.answer) parts.push(section('Answer of a person', json(found.answer)));
  if (found.reply) {
    const {reply} = found, usage = reply.usage ?? {};
    parts.push(section('Reply', facts([['Model', reply.model && text(reply.model)], ['Ended because', reply.finish && text(reply.finish)],
      ['Tokens', usage.input_tokens !== undefined ? `${usage.input_tokens} in, ${usage.output_tokens ?? 0} out` : ''], ['Cost', money(usage.cost_usd)]]),
    isRedacted(reply.message) ? redacted() : el('ol', {className: 'transcript'}, message(reply.message))));
  }
  if (found.calls.length) parts.push(section('Calls', el('ol', {className: 'transcript'}, found.calls.map((one) => call(run, one)))));
  if (found.prompt) parts.push(section('Prompt as sent', ...prompt(run, move.number, found.prompt)));
  if (found.lessons.length) parts.push(section('Lessons that later prompts mention', el('ul', {}, found.lessons.map((one) => el('li', {}, el('b', {}, words(one.kind)), ': ', said(one.explanation))))));
  if (found.budgets)
    parts.push(section('Budgets after it', el('div', {className: 'scroll', role: 'region', 'aria-label': 'Budgets', tabIndex: 0},
      el('table', {}, el('thead', {}, el('tr', {}, ['budget', 'used', 'limit', 'left'].map((name) => el('th', {scope: 'col'}, name)))),
        el('tbody', {}, found.budgets.map((one) => el('tr', {}, [said(words(one.name)), one.used, one.limit ?? 'none',
          one.limit === null ? '' : +(one.limit - one.used).toFixed(6)].map((cell) => el('td', {}, cell === '' ? '' : typeof cell === 'number' ? String(cell) : cell))))))))); 
  else parts.push(el('p', {className: 'note'}, 'Prompts, lessons and budgets are not known: a value that they follow from was redacted, or cannot be read.'));
  parts.push(section('Records', ...found.records.map((one) => record(run, one))));
  return [el('h2', {}, `Move ${move.number.toLocaleString('en')} of ${total.toLocaleString('en')}`), ...parts];
}
