/** The filters of runs, which several pages have. */

import {address, el, words} from './common.js';

const STATUSES = [['', 'any'], ['running', 'running'], ['suspended', 'waiting'], ['finished', 'finished']];
const ENDINGS = ['', 'completed', 'partial', 'handed_off', 'cancelled', 'aborted'];
const FIELDS = ['text', 'status', 'ending', 'actor', 'tag', 'metadata', 'model', 'waiting_role', 'run_id', 'since', 'until'];

export const field = (name, label, input) => el('label', {}, el('span', {}, label), Object.assign(input, {name}));
export const select = (options) => el('select', {}, options.map(([value, text]) => el('option', {value}, text)));
export const input = (type, placeholder = '') => el('input', {type, placeholder});

/** A form with filters of runs, filled in from the address of the page; `others` are fields of the page's own. */
export function filterForm(label = 'Runs', button = 'Search', others = []) {
  const more = el('details', {}, el('summary', {}, 'More filters'), el('div', {className: 'fields'},
    field('actor', 'Requested by', input('text', 'ann')), field('tag', 'Tag', input('text', 'billing')),
    field('metadata', 'Metadata', input('text', 'order=7')), field('model', 'Model', input('text')), field('waiting_role', 'Waits for role', input('text', 'manager')),
    field('run_id', 'Id begins with', input('text')), field('since', 'Started from (UTC)', input('date')),
    field('until', 'Started before (UTC)', input('date'))));
  const form = el('form', {className: 'filters', role: 'search', 'aria-label': label},
    el('div', {className: 'fields'},
      field('text', 'What was asked', input('search', 'part of it')), field('status', 'Status', select(STATUSES)),
      field('ending', 'Ending', select(ENDINGS.map((each) => [each, each ? words(each) : 'any']))),
      ...others.map(([name, text, control]) => field(name, text, control)),
      el('button', {type: 'submit'}, button), el('button', {type: 'reset'}, 'Clear')), more);
  for (const [name, value] of new URLSearchParams(location.search)) if (form.elements[name]) form.elements[name].value = value;
  if (FIELDS.slice(3).some((name) => form.elements[name].value)) more.open = true;
  return form;
}

/** What stands where no run is listed. */
export const none = (asked) => (FIELDS.some((name) => asked[name]) ? 'No run is like that.' : 'There is no run in the store yet. Each appears here as soon as an agent that writes this store begins it.');

const day = (text) => (text ? Date.parse(`${text}T00:00:00Z`) / 1000 : '');

/** What the form asks for; it stands in the address of the page, too. */
export function question(form) {
  const named = [...form.elements].filter((each) => each.name);
  const values = Object.fromEntries(named.map((each) => [each.name, each.value.trim()]));
  history.replaceState(null, '', address('', values));
  return {...values, since: day(values.since), until: day(values.until)};
}
