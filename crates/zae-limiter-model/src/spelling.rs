//! Names that somebody may have meant.

/// The names in the order of their distance to a misspelt one; names at the same distance keep their order. The distance
/// counts letters that are missing, superfluous, wrong, or swapped with their neighbour.
///
/// ```
/// use zae_limiter_model::nearest;
///
/// assert_eq!(nearest("rmp", ["tpm", "rpm", "images"]), ["rpm", "tpm", "images"]);
/// ```
pub fn nearest<T: AsRef<str>>(typed: &str, names: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut names: Vec<T> = names.into_iter().collect();
    names.sort_by_key(|name| distance(typed, name.as_ref()));
    names
}

/// The nearest name, if it is near enough to be meant: at most a third of its letters differ.
///
/// ```
/// use zae_limiter_model::likely;
///
/// assert_eq!(likely("rmp", ["tpm", "rpm"]), Some("rpm"));
/// assert_eq!(likely("uploads", ["tpm", "rpm"]), None);
/// ```
pub fn likely<T: AsRef<str>>(typed: &str, names: impl IntoIterator<Item = T>) -> Option<T> {
    let first = nearest(typed, names).into_iter().next()?;
    let letters = typed.chars().count().max(first.as_ref().chars().count());
    (distance(typed, first.as_ref()) * 3 <= letters).then_some(first)
}

/// How many changes of one letter, or swaps of two neighbours, turn one text into the other. Case does not count.
fn distance(a: &str, b: &str) -> usize {
    let letters = |text: &str| text.to_lowercase().chars().collect::<Vec<char>>();
    let (a, b) = (letters(a), letters(b));
    // Three rows of the table suffice: `rows[2]` belongs to the first `i` letters of `a`.
    let mut rows = [vec![0; b.len() + 1], vec![0; b.len() + 1], (0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        rows.rotate_left(1);
        rows[2][0] = i;
        for j in 1..=b.len() {
            let wrong = usize::from(a[i - 1] != b[j - 1]);
            let mut least = (rows[1][j - 1] + wrong).min(rows[1][j] + 1).min(rows[2][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[0][j - 2] + 1);
            }
            rows[2][j] = least;
        }
    }
    rows[2][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_counts_changed_letters() {
        for (a, b, changes) in [
            ("", "", 0),
            ("", "abc", 3),
            ("rpm", "rpm", 0),
            ("RPM", "rpm", 0),
            ("rmp", "rpm", 1),
            ("rp", "rpm", 1),
            ("rppm", "rpm", 1),
            ("rpn", "rpm", 1),
            ("tpm", "rpm", 1),
            ("mpr", "rpm", 2),
            ("kitten", "sitting", 3),
            ("größe", "grösse", 2),
        ] {
            assert_eq!(distance(a, b), changes, "{a} {b}");
            assert_eq!(distance(b, a), changes, "{b} {a}");
        }
    }

    #[test]
    fn a_guess_is_near() {
        for (typed, guess) in [
            ("rmp", Some("rpm")),
            ("rp", Some("rpm")),
            ("token", Some("tokens")),
            ("x", None),
            ("", None),
            ("uploads", None),
        ] {
            assert_eq!(likely(typed, ["rpm", "tokens"]), guess, "{typed}");
        }
        assert_eq!(likely("rpm", [""; 0]), None);
    }
}
