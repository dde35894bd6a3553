//! The live view: redrawn on a terminal, else one line a second.

use std::collections::BTreeMap;

use zae_limiter::{LimitStatus, RateLimiter};

use crate::context::Context;
use crate::failure::Failure;
use crate::figures::{compact, grouped};
use crate::line::Line;
use crate::printer::{Look, Printer, Verbosity};

use super::cast::{CAST, LIMITS, RESOURCE, keys};
use super::tally::{RECENT, Tally};

/// The kind of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Show {
    /// Redrawn, on a terminal.
    Picture,
    /// One line a second.
    Lines,
    /// No view.
    Nothing,
}

/// The status of every limit, by entity and limit.
type Standing = BTreeMap<(String, String), LimitStatus>;

/// Columns of the longest name with its branch.
const NAME_COLUMNS: usize = 15;
/// Columns of a limit besides its bar: two spaces and the number.
const NUMBER_COLUMNS: usize = 8;
const COUNT_COLUMNS: usize = 9;

impl Show {
    pub(super) fn on(printer: &Printer) -> Self {
        if printer.verbosity == Verbosity::Quiet || printer.is_json() {
            Self::Nothing
        } else if printer.terminal.stdout {
            Self::Picture
        } else {
            Self::Lines
        }
    }

    /// The interval of frames.
    pub(super) fn every_ms(self) -> Option<u64> {
        match self {
            Self::Picture => Some(200),
            Self::Lines => Some(1_000),
            Self::Nothing => None,
        }
    }

    /// Shows one frame.
    pub(super) async fn frame(
        self,
        tally: &Tally,
        working: usize,
        phase: &str,
        total_ms: u64,
        limiter: &RateLimiter,
        context: &mut Context,
    ) -> Result<(), Failure> {
        let seconds = tally.elapsed_ms / 1_000;
        match self {
            Self::Picture => {
                let standing = standing(limiter).await?;
                let now = Now { tally, working, phase, total_ms, standing };
                context.printer.redraw(|columns| now.picture(columns));
            }
            Self::Lines => {
                let standing = standing(limiter).await?;
                let now = Now { tally, working, phase, total_ms, standing };
                context.printer.line(now.line(seconds));
            }
            Self::Nothing => {}
        }
        Ok(())
    }
}

/// Reads the status of all limits. The status of a key includes its ancestors.
async fn standing(limiter: &RateLimiter) -> Result<Standing, Failure> {
    let mut standing = Standing::new();
    for key in keys() {
        for status in limiter.available(CAST[key].id, RESOURCE, &[]).await? {
            let place = (status.entity_id.to_string(), status.limit_name.to_string());
            standing.insert(place, status);
        }
    }
    Ok(standing)
}

/// The data of one frame.
struct Now<'a> {
    tally: &'a Tally,
    working: usize,
    phase: &'a str,
    total_ms: u64,
    standing: Standing,
}

impl Now<'_> {
    fn status(&self, member: usize, limit: &str) -> Option<&LimitStatus> {
        self.standing.get(&(CAST[member].id.to_owned(), limit.to_owned()))
    }

    /// The frame as one line.
    fn line(&self, seconds: u64) -> String {
        let last = usize::try_from(seconds).ok().and_then(|now| now.checked_sub(1));
        let last = last.and_then(|second| self.tally.seconds.get(second));
        let (admitted, refused) = last.copied().unwrap_or_default();
        let left = self.status(0, LIMITS[1]).map_or(0, |status| status.available.whole_tokens());
        format!(
            "{seconds:>3} s  {admitted:>3} admitted  {refused:>3} refused  {:>2} in flight  \
             acme tpm {:>7}  {}",
            self.working,
            grouped(left),
            self.phase,
        )
        .trim_end()
        .to_owned()
    }

    fn picture(&self, columns: usize) -> Vec<Line> {
        let Some(layout) = Layout::in_columns(columns) else {
            // One column stays free, so that no terminal wraps the line.
            let text = format!("too narrow: {} columns needed", Layout::COLUMNS_MIN + 1);
            return vec![Line::of(Look::Warn, text)];
        };
        let mut lines = vec![self.clock(columns), Line::default(), layout.head()];
        lines.extend((0..CAST.len()).map(|member| self.member(member, &layout)));
        lines.push(Line::default());
        let mut counts = Line::default();
        for (look, count, what) in [
            (Look::Good, self.tally.admitted, "admitted"),
            (Look::Bad, self.tally.refused, "refused"),
            (Look::Plain, self.working as u64, "in flight"),
            (Look::Plain, self.tally.failed, "failed"),
            (Look::Plain, self.tally.underestimated, "underestimated"),
        ] {
            let mut more = counts.clone();
            more.push(Look::Plain, if counts.width() == 0 { "" } else { "   " });
            more.push(if count > 0 { look } else { Look::Dim }, grouped(count));
            more.push(Look::Dim, format!(" {what}"));
            if more.width() > columns {
                break;
            }
            counts = more;
        }
        lines.push(counts);
        lines
    }

    /// The progress bar of the run.
    fn clock(&self, columns: usize) -> Line {
        let elapsed = self.tally.elapsed_ms.min(self.total_ms);
        let text = format!(
            " {:>4}.{} of {} s  ",
            elapsed / 1_000,
            elapsed / 100 % 10,
            self.total_ms / 1_000
        );
        let room = columns.saturating_sub(text.len() + 14).clamp(4, 44);
        let mut line = Line::of(Look::Plain, text.trim_start());
        line.pad_to(16);
        let full = scaled(elapsed, self.total_ms, room);
        line.push(Look::Good, "━".repeat(full));
        line.push(Look::Dim, "─".repeat(room - full));
        let phase = format!("  {}", self.phase);
        if line.width() + phase.len() <= columns {
            line.push(Look::Head, phase);
        }
        line
    }

    fn member(&self, place: usize, layout: &Layout) -> Line {
        let mut line = Line::of(Look::Dim, CAST[place].branch);
        let look = if CAST[place].calls_per_minute > 0 { Look::Plain } else { Look::Head };
        line.push(look, CAST[place].id);
        for (at, limit) in LIMITS.iter().enumerate() {
            line.pad_to(NAME_COLUMNS + at * (layout.bar + NUMBER_COLUMNS));
            if let Some(status) = self.status(place, limit) {
                draw_limit(&mut line, status, layout.bar);
            }
        }
        let Some(counts) = layout.counts else { return line };
        line.pad_to(counts);
        let tally = &self.tally.members[place];
        line.push(Look::Good, format!("{:>COUNT_COLUMNS$}", grouped(tally.admitted)));
        let look = if tally.refused > 0 { Look::Bad } else { Look::Dim };
        line.push(look, format!("{:>COUNT_COLUMNS$}", grouped(tally.refused)));
        if layout.has_recent {
            line.push(Look::Plain, "  ");
            line.push(Look::Good, sparkline(&self.tally.recent(place)));
        }
        line
    }
}

/// The widths of the view's columns. A narrow view lacks, in this order, the last seconds, the counts, and the bars.
#[derive(Debug, PartialEq, Eq)]
struct Layout {
    /// Columns of a bar.
    bar: usize,
    /// The first column of the counts.
    counts: Option<usize>,
    has_recent: bool,
}

impl Layout {
    /// The names, and a number for each limit.
    const COLUMNS_MIN: usize = NAME_COLUMNS + LIMITS.len() * NUMBER_COLUMNS;

    /// `None` if not even the numbers fit.
    fn in_columns(columns: usize) -> Option<Self> {
        let bar_with = |others: usize| {
            let left = columns.checked_sub(Self::COLUMNS_MIN + others)?;
            Some((left / LIMITS.len()).min(20))
        };
        let (recent, counts) = (RECENT + 2, 2 * COUNT_COLUMNS);
        let wide = |others: usize, bar_min: usize| bar_with(others).filter(|bar| *bar >= bar_min);
        let (bar, has_counts, has_recent) = match (wide(counts + recent, 5), wide(counts, 3)) {
            (Some(bar), _) => (bar, true, true),
            (None, Some(bar)) => (bar, true, false),
            (None, None) => (wide(0, 3).or_else(|| bar_with(0).map(|_| 0))?, false, false),
        };
        let limits = NAME_COLUMNS + LIMITS.len() * (bar + NUMBER_COLUMNS);
        Some(Self { bar, counts: has_counts.then_some(limits), has_recent })
    }

    fn head(&self) -> Line {
        let mut line = Line::default();
        for (at, limit) in LIMITS.iter().enumerate() {
            line.pad_to(NAME_COLUMNS + at * (self.bar + NUMBER_COLUMNS));
            line.push(Look::Dim, format!("{limit} left"));
        }
        let Some(counts) = self.counts else { return line };
        line.pad_to(counts);
        line.push(
            Look::Dim,
            format!("{:>COUNT_COLUMNS$}{:>COUNT_COLUMNS$}", "admitted", "refused"),
        );
        if self.has_recent {
            line.push(Look::Dim, "  last 6 s");
        }
        line
    }
}

/// Draws the bar and the number of the available tokens.
fn draw_limit(line: &mut Line, status: &LimitStatus, columns: usize) {
    let (left, capacity) = (status.available.get(), status.rate.capacity().get());
    let positive = u64::try_from(left).unwrap_or(0);
    let capacity = capacity.unsigned_abs();
    let eighths = scaled(positive, capacity, columns * 8);
    let look = match positive {
        _ if left < 0 => Look::Bad,
        left if left * 10 < capacity => Look::Bad,
        left if left * 10 < capacity * 4 => Look::Warn,
        _ => Look::Good,
    };
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(['▏', '▎', '▍', '▌', '▋', '▊', '▉'][eighths % 8 - 1]);
    }
    let empty = columns - eighths.div_ceil(8);
    line.push(look, bar);
    line.push(Look::Dim, "░".repeat(empty));
    let look = if left < 0 { Look::Bad } else { Look::Plain };
    line.push(look, format!(" {:>5}", compact(status.available.whole_tokens())));
}

/// `amount / total` of `columns`, rounded down.
fn scaled(amount: u64, total: u64, columns: usize) -> usize {
    let scaled = u128::from(amount) * columns as u128 / u128::from(total.max(1));
    usize::try_from(scaled).map_or(columns, |scaled| scaled.min(columns))
}

fn sparkline(values: &[u64]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().copied().max().unwrap_or(0).max(1);
    let level = |value: u64| usize::try_from(value * 7 / most).unwrap_or(7);
    values.iter().map(|value| LEVELS[level(*value)]).collect()
}
