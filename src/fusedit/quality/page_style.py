"""The report page's style sheet: light and dark by the reader's own setting, down to a phone's width."""

from typing import Final

STYLE: Final = """\
:root {
  --ground: #f7f6f3; --card: #ffffff; --ink: #1d1d1f; --soft: #65656d; --line: #e2e0da;
  --good: #17713b; --good-ground: #e3f4e8; --bad: #b3261e; --bad-ground: #fde8e6; --accent: #5b3fd6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #141417; --card: #1e1e23; --ink: #ececf0; --soft: #a0a0aa; --line: #33333b;
    --good: #7bd89a; --good-ground: #16321f; --bad: #ff9c94; --bad-ground: #431a17; --accent: #ab9bff;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
header, main { max-width: 1180px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }
.intro { color: var(--soft); max-width: 72ch; margin: 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 24px; margin: 28px 0; }
.heading { display: flex; align-items: center; gap: 12px; flex-wrap: wrap; }
h2 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
.badge { border-radius: 99px; padding: 2px 12px; font-size: .85rem; font-weight: 600; }
.badge.good, .verdict.good { color: var(--good); background: var(--good-ground); }
.badge.bad, .verdict.bad { color: var(--bad); background: var(--bad-ground); }
.facts { color: var(--soft); margin: 4px 0 16px; }
.verdict { border-radius: 8px; padding: 8px 12px; font-size: .92rem; margin: 12px 0; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; }
.tile { border: 1px solid var(--line); border-radius: 10px; padding: 10px 14px; }
.label { color: var(--soft); font-size: .8rem; }
.value { font-size: 1.5rem; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.25; }
.value { white-space: nowrap; }
.wide table { min-width: 640px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody th { font-weight: 500; color: var(--soft); white-space: nowrap; }
thead th { font-weight: 600; }
tr.refused td { color: var(--soft); }
.small { color: var(--soft); font-size: .85rem; margin: 8px 0 0; }
article { border-top: 1px solid var(--line); margin-top: 24px; padding-top: 16px; }
h3 { font-size: 1.02rem; font-weight: 600; margin: 0 0 10px; overflow-wrap: anywhere; }
.seed { color: var(--soft); font-weight: 400; margin-left: 10px; font-size: .85rem; white-space: nowrap; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(220px, 44%), 1fr)); gap: 12px; }
figure { margin: 0; min-width: 0; }
figure img { display: block; width: 100%; height: auto; border-radius: 8px; border: 1px solid var(--line); }
figcaption { color: var(--soft); font-size: .82rem; margin-top: 4px; }
.missing {
  aspect-ratio: 1; display: grid; place-items: center; padding: 16px; text-align: center; font-size: .85rem;
  border: 2px dashed var(--bad); border-radius: 8px; color: var(--bad); overflow-wrap: anywhere;
}
details { border-top: 1px solid var(--line); margin-top: 20px; padding-top: 12px; }
summary { cursor: pointer; color: var(--accent); font-weight: 550; }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
details table { margin-top: 10px; }
details li { font-size: .9rem; }
@media (max-width: 560px) { section { padding: 16px; border-radius: 0; margin-left: -20px; margin-right: -20px; } }
"""
