'use strict';
// Where rollouts went: every admitted rollout ends in exactly one way, so the parts of a bar add up
// to all of them.

(function () {
  const {runs, by_id, element, add, number, percent, is_number, column, named, is_shown} = page;

  const kParts = [
    {key: 'trained', name: 'trained', about: 'in a batch that was trained'},
    {key: 'waiting', name: 'waiting', about: 'completed, waiting for a batch'},
    {key: 'running', name: 'running', about: 'in flight at the last step'},
    {key: 'filtered', name: 'filtered', about: 'left out: the group\'s advantages were all 0'},
    {key: 'stale', name: 'stale', about: 'completed, but too old when their batch came'},
    {key: 'dropped', name: 'dropped', about: 'completed, in a group that was given up'},
    {key: 'cancelled', name: 'cancelled', about: 'stopped: stale, or their group was given up'},
    {key: 'failed', name: 'failed', about: 'environment, time-out, empty reply, ..'},
  ];

  const last_of = (run, name) => {
    const values = column(run, 'metrics', name) || [];
    return values.length > 0 && is_number(values[values.length - 1]) ? values[values.length - 1]
                                                                    : null;
  };
  const sum_of = (run, name) =>
      (column(run, 'metrics', name) || []).reduce((sum, each) => sum + (is_number(each) ? each : 0),
                                                  0);

  function account_of(run) {
    const admitted = last_of(run, 'account/admitted');
    if (admitted === null) return null;
    const parts = kParts.map((part) => ({...part, count: last_of(run, 'account/' + part.key) || 0}));
    const kinds = Object.keys(run.metrics.columns).filter((name) => name.startsWith('failures/'))
        .map((name) => ({name: name.slice('failures/'.length), count: sum_of(run, name)}));
    return {run, admitted, parts, kinds};
  }

  function bar(account) {
    const node = element('div', 'flow');
    node.setAttribute('role', 'img');
    node.setAttribute('aria-label', account.parts.filter((part) => part.count > 0)
        .map((part) => part.name + ' ' + number(part.count)).join(', '));
    for (const part of account.parts) {
      if (part.count <= 0) continue;
      const piece = element('span', 'flow-' + part.key);
      piece.style.flexGrow = String(part.count);
      piece.title = part.name + ': ' + number(part.count) + ' of ' + number(account.admitted);
      add(node, piece);
    }
    return node;
  }

  function table(account) {
    const rows = account.parts.filter((part) => part.count > 0).map((part) => {
      const name = add(element('th'), element('span', 'dot flow-' + part.key), ' ' + part.name);
      const kinds = part.key === 'failed' && account.kinds.length > 0
          ? ': ' + account.kinds.map((kind) => kind.name.replace(/_/g, ' ') + ' ' +
                                               number(kind.count)).join(', ') : '';
      return add(element('tr'), name, element('td', 'right', number(part.count)),
          element('td', 'right', percent(part.count / account.admitted)),
          element('td', '', part.about + kinds));
    });
    const sum = account.parts.reduce((total, part) => total + part.count, 0);
    rows.push(add(element('tr', 'sum'), element('th', '', 'admitted'),
        element('td', 'right', number(account.admitted)), element('td', 'right', ''),
        element('td', '', sum === account.admitted ? 'all of the above'
                                                   : 'but the parts add up to ' + number(sum))));
    return add(element('div', 'scroll'),
               add(element('table', 'numbers'), add(element('tbody'), ...rows)));
  }

  function given_up(account) {
    const groups = account.run.given_up || [];
    if (groups.length === 0) return null;
    const block = element('details');
    add(block, element('summary', '', number(account.run.given_up_count) + ' groups given up'));
    const head = add(element('tr'), ...['Step', 'Group', 'Environment', 'Example', 'Finished',
        'Last message'].map((title) => element('th', '', title)));
    const body = groups.map((group) => add(element('tr'), element('td', 'right', group.step),
        element('td', 'right', group.group), element('td', '', group.environment),
        element('td', 'right', group.example),
        element('td', '', group.survivors + (group.trained ? ', trained' : '')),
        element('td', 'message', group.message)));
    return add(block, add(element('div', 'scroll tall'), add(element('table', 'numbers'),
        add(element('thead'), head), add(element('tbody'), ...body))));
  }

  // Each server's life, a line for each change of its state.
  function servers(account) {
    const lives = account.run.servers || [];
    if (lives.length === 0) return null;
    const block = element('details');
    add(block, element('summary', '', number(lives.length) +
        (lives.length === 1 ? ' server sampled' : ' servers sampled')));
    const head = add(element('tr'), ...['Server', 'Seconds', 'State', 'What happened'].map(
        (title) => element('th', '', title)));
    const body = lives.flatMap((life) => life.events.map((event, i) => {
      const row = element('tr');
      if (i === 0) {
        const last = life.events[life.events.length - 1].state;
        const name = add(element('td', '', life.server), element('br'),
            element('span', 'note', 'at the end ' + last));
        name.rowSpan = life.events.length;
        add(row, name);
      }
      return add(row, element('td', 'right', event.time.toFixed(1)),
          element('td', '', event.state), element('td', 'message', event.text));
    }));
    return add(block, add(element('div', 'scroll tall'), add(element('table', 'numbers'),
        add(element('thead'), head), add(element('tbody'), ...body))));
  }

  const accounts = runs.map(account_of).filter((account) => account !== null);
  if (accounts.length === 0) return;
  by_id('account-section').hidden = false;
  function draw() {
    by_id('account').replaceChildren(...accounts.filter((each) => is_shown(each.run))
        .map((account) => {
          const card = element('div', 'card');
          if (runs.length > 1) add(card, add(element('h3'), named(account.run)));
          add(card, bar(account), table(account));
          const groups = given_up(account);
          if (groups) add(card, groups);
          const lives = servers(account);
          return lives ? add(card, lives) : card;
        }));
  }
  draw();
  page.on_change(draw);
})();
