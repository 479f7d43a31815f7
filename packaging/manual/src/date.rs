//! The date on the pages.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

const VARIABLE: &str = "SOURCE_DATE_EPOCH";

/// The date of the build, as year, month and day: of `SOURCE_DATE_EPOCH` if it is set, otherwise today's.
pub(crate) fn of_build() -> Result<String> {
    let seconds = match std::env::var(VARIABLE) {
        Ok(text) => text.parse().with_context(|| format!("{VARIABLE} is no number of seconds: {text:?}"))?,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs(),
    };
    Ok(date(seconds))
}

/// The date in UTC of a time in seconds since 1970.
fn date(seconds: u64) -> String {
    let mut days = seconds / 86_400;
    let mut year = 1970;
    let leaps = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while days >= 365 + u64::from(leaps(year)) {
        days -= 365 + u64::from(leaps(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(leaps(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year:04}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_735_689_599, "2024-12-31"),
            (1_735_689_600, "2025-01-01"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds), expected, "{seconds}");
        }
    }
}
