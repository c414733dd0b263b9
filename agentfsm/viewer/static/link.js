/** Opens a one-time link. Its pass leaves the address at once, and is used up only by a click: programs read mails, too. */

import {ApiError, address, el, said} from './common.js';

const pass = location.hash.slice(1), main = document.querySelector('main');
history.replaceState(null, '', address('link'));

async function open(button) {
  button.disabled = true;
  try {
    const answer = await fetch(address('api/link'), {
      method: 'POST', headers: {'content-type': 'application/json'}, body: JSON.stringify({token: pass}),
    });
    const data = await answer.json();
    if (!answer.ok) throw new ApiError(data.error, answer.status);
    location.replace(address(data.next));
  } catch (error) {
    main.append(el('p', {className: 'failed', role: 'alert'}, said(error.message)));
  }
}

if (pass) {
  const button = el('button', {type: 'button', className: 'main', onclick: () => open(button)}, 'Open');
  main.append(el('p', {}, 'Somebody asked you to look at a run of an agent. The link works once, in this browser.'), button);
} else {
  main.append(el('p', {}, 'This address has no link in it: open the one that you were sent again, or ask for a new one.'));
}
