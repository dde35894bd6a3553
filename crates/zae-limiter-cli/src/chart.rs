//! Text charts: stacked bars over time.
//!
//! Each series in a bar has its own fill character, so that the chart needs no colours. No line is
//! wider than the requested width.

use unicode_width::UnicodeWidthStr as _;

use crate::figures::compact;
use crate::line::Line;
use crate::printer::Look;

/// A cell filled by one to eight eighths.
const EIGHTHS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The fill of the second, third, … series; the first is solid.
const FILLINGS: [char; 3] = ['░', '▒', '▓'];

/// The widest bar, in columns.
const BAR_COLUMNS_MAX: usize = 6;

/// Columns of the axis numbers: `Scale` picks round ones that fit.
const NUMBER_COLUMNS: usize = 5;

/// A narrower chart has no axis.
const AXIS_FROM_COLUMNS: usize = 20;

/// One series of values.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// For the legend.
    pub name: String,
    pub look: Look,
    /// One for each label.
    pub values: Vec<u64>,
}

/// The data of a chart.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    pub title: String,
    /// One for each value. Labels that do not fit are left out.
    pub labels: Vec<String>,
    /// Stacked from the bottom up.
    pub series: Vec<Series>,
}

impl Chart {
    /// Draws the chart at most `columns` wide, with bars about `rows` lines high.
    pub(crate) fn lines(&self, columns: usize, rows: usize) -> Vec<Line> {
        let columns = columns.max(1);
        // Ticks are at quarters of the height.
        let rows = (rows / 4 * 4).max(4);
        let mut lines = vec![Line::of(Look::Head, &self.title)];
        let points = self.series.iter().map(|series| series.values.len()).max().unwrap_or(0);
        if points == 0 {
            lines.push(Line::of(Look::Dim, "nothing to draw"));
            return lines.into_iter().map(|line| line.cut(columns)).collect();
        }
        let axis = if columns < AXIS_FROM_COLUMNS { 0 } else { NUMBER_COLUMNS + 2 };
        let bars = Bars::new(&self.series, points, columns - axis);
        let scale = Scale::up_to(bars.highest());
        for row in (0..rows).rev() {
            let mut line = Line::default();
            if axis > 0 {
                line.push(Look::Dim, scale.mark(row + 1, rows));
            }
            bars.draw_row(row, rows, &scale, &mut line);
            lines.push(line);
        }
        if axis > 0 {
            let ground = "─".repeat(bars.columns());
            lines.push(Line::of(Look::Dim, format!("{:>NUMBER_COLUMNS$} ┼{ground}", 0)));
        }
        lines.push(self.labels_line(&bars, axis, columns));
        lines.extend(self.legend(&bars, axis, columns));
        lines.into_iter().map(|line| line.cut(columns)).collect()
    }

    /// Labels under their bars, as many as fit with a gap.
    fn labels_line(&self, bars: &Bars, axis: usize, columns: usize) -> Line {
        let mut line = Line::default();
        for (at, label) in self.labels.iter().step_by(bars.points_per_bar).enumerate() {
            let column = axis + at * bars.pitch;
            let is_free = at == 0 || line.width() + 2 <= column;
            if is_free && column + label.width() <= columns {
                line.pad_to(column);
                line.push(Look::Dim, label);
            }
        }
        line
    }

    /// The names of the series, and how many values each bar averages.
    fn legend(&self, bars: &Bars, axis: usize, columns: usize) -> Vec<Line> {
        let mut entries: Vec<(Look, String)> = Vec::new();
        if self.series.len() > 1 {
            let named = self.series.iter().enumerate();
            entries
                .extend(named.map(|(at, one)| (one.look, format!("{} {}", filling(at), one.name))));
        }
        if bars.points_per_bar > 1 {
            let note = format!("each bar is the mean of {}", bars.points_per_bar);
            entries.push((Look::Dim, note));
        }
        let mut lines: Vec<Line> = Vec::new();
        for (look, text) in entries {
            match lines.last_mut() {
                Some(line) if line.width() + 3 + text.width() <= columns => {
                    line.push(Look::Plain, "   ");
                    line.push(look, text);
                }
                _ => {
                    let mut line = Line::of(Look::Plain, " ".repeat(axis));
                    line.push(look, text);
                    lines.push(line);
                }
            }
        }
        lines
    }
}

fn filling(series: usize) -> char {
    match series.checked_sub(1) {
        None => '█',
        Some(at) => FILLINGS[at % FILLINGS.len()],
    }
}

/// The values and positions of the bars.
struct Bars {
    /// For each bar the values of its series, from the bottom up.
    values: Vec<Vec<u64>>,
    looks: Vec<Look>,
    points_per_bar: usize,
    /// Columns from one bar to the next.
    pitch: usize,
    /// Filled columns of each bar.
    thickness: usize,
}

impl Bars {
    fn new(series: &[Series], points: usize, columns: usize) -> Self {
        let points_per_bar = points.div_ceil(columns);
        let count = points.div_ceil(points_per_bar);
        let pitch = (columns / count).clamp(1, BAR_COLUMNS_MAX + 1);
        let thickness = if pitch > 2 { pitch - 1 } else { pitch };
        let values = (0..count).map(|bar| {
            let from = bar * points_per_bar;
            series.iter().map(|one| mean(&one.values, from, points_per_bar)).collect()
        });
        let looks = series.iter().map(|one| one.look).collect();
        Self { values: values.collect(), looks, points_per_bar, pitch, thickness }
    }

    fn columns(&self) -> usize {
        self.values.len() * self.pitch
    }

    fn highest(&self) -> u128 {
        let sums = self.values.iter().map(|bar| bar.iter().copied().map(u128::from).sum());
        sums.max().unwrap_or(0)
    }

    /// Appends one row of all bars; row 0 is the lowest.
    fn draw_row(&self, row: usize, rows: usize, scale: &Scale, line: &mut Line) {
        for bar in &self.values {
            let mut blank = self.pitch;
            if let Some((series, cell)) = cell(bar, row, rows, scale) {
                line.push(self.looks[series], cell.to_string().repeat(self.thickness));
                blank -= self.thickness;
            }
            line.push(Look::Plain, " ".repeat(blank));
        }
    }
}

/// The mean of `count` values, rounded up, so that a small value is still visible.
fn mean(values: &[u64], from: usize, count: usize) -> u64 {
    let few = values.get(from..).unwrap_or_default();
    let few = &few[..few.len().min(count)];
    let sum: u128 = few.iter().copied().map(u128::from).sum();
    u64::try_from(sum.div_ceil(few.len().max(1) as u128)).unwrap_or(u64::MAX)
}

/// The series and character of a bar's cell in a row; `None` above the bar.
fn cell(bar: &[u64], row: usize, rows: usize, scale: &Scale) -> Option<(usize, char)> {
    let mut below = 0_u128;
    let mut filled = 0;
    for (series, value) in bar.iter().copied().enumerate() {
        below += u128::from(value);
        if value == 0 {
            continue;
        }
        // The lowest series is exact to an eighth of a cell; the others fill whole cells.
        let eighths = scale.eighths(below, rows);
        let end = if series == 0 { eighths.max(1) } else { (eighths + 4) / 8 * 8 };
        if row * 8 < end && row * 8 >= filled {
            return Some(match end - row * 8 {
                eighths @ 1..8 => (series, EIGHTHS[eighths - 1]),
                _ => (series, filling(series)),
            });
        }
        filled = filled.max(end.next_multiple_of(8));
    }
    None
}

/// The axis: its highest number and the number of ticks.
struct Scale {
    top: u128,
    steps: usize,
}

impl Scale {
    /// The lowest axis with round numbers that reaches `highest`.
    fn up_to(highest: u128) -> Self {
        let candidates = [4, 2, 1].map(|steps| {
            let step = round_up(highest.max(1).div_ceil(steps as u128));
            Self { top: step * steps as u128, steps }
        });
        // The first of equals, which has the most ticks.
        candidates.into_iter().min_by_key(|scale| scale.top).expect("there are three")
    }

    /// The height of a value, in eighths of a cell.
    fn eighths(&self, value: u128, rows: usize) -> usize {
        let all = rows as u128 * 8;
        let rounded = (value * all * 2 + self.top) / (self.top * 2);
        usize::try_from(rounded.min(all)).expect("no more than there are rows")
    }

    /// The axis text of the row that ends at `height`.
    fn mark(&self, height: usize, rows: usize) -> String {
        if (height * self.steps).is_multiple_of(rows) {
            let number = self.top * height as u128 / rows as u128;
            let number = compact(i128::try_from(number).unwrap_or(i128::MAX));
            format!("{number:>NUMBER_COLUMNS$} ┤")
        } else {
            format!("{:NUMBER_COLUMNS$} │", "")
        }
    }
}

/// The next round number: one or two digits and zeros.
fn round_up(number: u128) -> u128 {
    const TENTHS: [u128; 9] = [10, 15, 20, 25, 30, 40, 50, 60, 80];
    let mut power = 1;
    loop {
        let round = TENTHS.iter().map(|tenths| tenths * power);
        let whole = round.filter(|tenths| tenths.is_multiple_of(10)).map(|tenths| tenths / 10);
        if let Some(found) = whole.into_iter().find(|round| *round >= number) {
            return found;
        }
        power *= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: &[(&str, &[u64])]) -> Chart {
        let points = series.iter().map(|(_, values)| values.len()).max().unwrap_or(0);
        let series = series.iter().map(|(name, values)| Series {
            name: (*name).to_owned(),
            look: Look::Good,
            values: values.to_vec(),
        });
        let labels = (0..points).map(|at| format!("{at} s")).collect();
        Chart { title: "calls per second".to_owned(), labels, series: series.collect() }
    }

    fn text(chart: &Chart, columns: usize, rows: usize) -> String {
        let lines = chart.lines(columns, rows);
        for line in &lines {
            assert!(line.width() <= columns, "{line:?} in {columns} columns");
        }
        lines.iter().map(|line| format!("{}\n", line.plain())).collect()
    }

    #[test]
    fn series_stand_on_top_of_each_other() {
        let admitted: Vec<u64> = (0..12).map(|n| 10 + 3 * n).collect();
        let refused: Vec<u64> = (0..12).map(|n| if n > 7 { 5 * n } else { n / 7 }).collect();
        let chart = chart(&[("admitted", &admitted), ("refused", &refused)]);
        insta::assert_snapshot!(text(&chart, 60, 8));
    }

    #[test]
    fn odd_numbers_of_values() {
        let mut all = String::new();
        for (name, values) in [
            ("nothing", &[][..]),
            ("one value", &[1]),
            ("zeros", &[0, 0, 0]),
            ("huge values", &[u64::MAX, u64::MAX / 2, 1]),
            ("four at most", &[0, 1, 2, 3, 4]),
        ] {
            all.push_str(&format!("{name}:\n{}\n", text(&chart(&[("calls", values)]), 40, 4)));
        }
        insta::assert_snapshot!(all);
    }

    #[test]
    fn values_beyond_the_columns_are_averaged_and_the_legend_says_so() {
        let values: Vec<u64> = (0..200).map(|n| n * n).collect();
        insta::assert_snapshot!(text(&chart(&[("calls", &values)]), 50, 8));
    }

    #[test]
    fn nothing_is_wider_than_the_terminal() {
        let values: Vec<u64> = (0..30).map(|n| n * 1_000).collect();
        let chart = chart(&[("admitted", &values), ("refused", &values), ("failed", &values)]);
        for columns in 0..120 {
            for rows in [0, 4, 8, 11] {
                text(&chart, columns.max(1), rows);
                assert!(chart.lines(columns, rows).len() >= 7);
            }
        }
        insta::assert_snapshot!(text(&chart, 12, 4));
    }

    #[test]
    fn the_axis_has_round_numbers_and_reaches_the_highest_value() {
        for highest in (0..3_000).chain([u128::from(u64::MAX) * 4, 999_999, 1_000_001]) {
            let scale = Scale::up_to(highest);
            assert!(scale.top >= highest && scale.top <= 2 * highest.max(1), "{highest}");
            for row in 1..=8 {
                assert_eq!(scale.mark(row, 8).width(), NUMBER_COLUMNS + 2, "{highest}");
            }
        }
    }
}
