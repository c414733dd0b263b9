"""The style sheet of every page about runs: of reports, and of the viewer. It has a light and a dark theme."""

from __future__ import annotations

__all__ = ["STYLE"]


STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--grey:#59636e;--line:#d1d9e0;--paper:#fff;--soft:#f6f8fa;--good:#1a7f37;
--bad:#b3202a;--open:#0969da;--now:#bf3989}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--grey:#9198a1;--line:#3d444d;--paper:#0d1117;--soft:#151b23;
--good:#3fb950;--bad:#ff7b72;--open:#4493f8;--now:#f778ba}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:80rem;background:var(--paper);color:var(--ink);
font:15px/1.5 Inter,Helvetica,Arial,"Liberation Sans","DejaVu Sans",sans-serif}
h1,h2,h3{line-height:1.25;overflow-wrap:anywhere}
h1{font-size:1.5rem}h2{margin-top:2.5rem;border-bottom:1px solid var(--line)}h3{margin-top:1.75rem;font-size:1.05rem}
a{color:var(--open)}
small,caption,.note{color:var(--grey)}
.said{overflow-wrap:anywhere;unicode-bidi:isolate}
pre.said{margin:.15rem 0;max-height:30rem;overflow:auto;contain:paint}
pre,code{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere}
code{overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:minmax(7rem,max-content) minmax(0,1fr);gap:.25rem 1rem}
dt{color:var(--grey)}dd{margin:0;min-width:0}
.scroll{overflow-x:auto;contain:inline-size}
.scroll.long{position:relative;overflow:auto;max-height:75vh}.scroll.long thead th{position:sticky;top:0}
table{border-collapse:collapse;width:100%;font-size:13px}
caption{text-align:left;padding:.25rem 0}
th,td{text-align:left;vertical-align:top;padding:.3rem .5rem;border-top:1px solid var(--line);max-width:24rem;
overflow-wrap:break-word}
thead th{background:var(--soft);white-space:nowrap}
tr.now>td,tr:target>td{background:var(--soft);box-shadow:inset 0 2px var(--now),inset 0 -2px var(--now)}
em{color:var(--grey);font-style:normal}
ol.transcript{list-style:none;padding:0}
ol.transcript>li{margin:.5rem 0;padding:.4rem .75rem;border-left:4px solid var(--line);background:var(--soft)}
li.user,li.person{border-color:var(--open)}li.model{border-color:var(--good)}
.verdict{padding:.1rem .5rem;border:2px solid;border-radius:.4rem}
.verdict.good{color:var(--good)}.verdict.bad{color:var(--bad);border-width:4px}
.verdict.open{color:var(--open)}.verdict.unknown{color:var(--bad);border-style:dashed}
figure{margin:0}svg{display:block;max-width:100%;height:auto}
figure.narrow{display:none}
svg.agentfsm-auto g.now text{fill:var(--now);font-weight:700}
svg.agentfsm-auto path.line.now{stroke:var(--now);stroke-width:6}
.steps{display:flex;gap:.75rem;align-items:center;flex-wrap:wrap;margin:.5rem 0}.steps input{flex:1 1 12rem}
.steps button{font:inherit;min-height:2.2rem}
@media (max-width:48rem){body{padding:.75rem}figure.wide{display:none}figure.narrow{display:block}
dl{grid-template-columns:1fr;gap:0}dd{margin:0 0 .5rem}table{min-width:44rem}}
@media print{:root{--ink:#000;--paper:#fff;--soft:#fff;--grey:#444}body{max-width:none;font-size:10pt}
.steps,nav{display:none}pre.said{max-height:none}.scroll,.scroll.long{overflow:visible;contain:none;max-height:none}table{font-size:8pt;min-width:0}
tr,li,figure{break-inside:avoid}thead{display:table-header-group}figure.wide svg{max-height:24cm}
figure.narrow{display:none}figure.wide{display:block}td :is(pre,code){font-size:inherit}
dl{grid-template-columns:minmax(7rem,max-content) minmax(0,1fr);gap:.25rem 1rem}dd{margin:0}}
"""
