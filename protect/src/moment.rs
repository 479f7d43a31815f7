//! A moment as podman writes it: `2026-11-29T13:04:52.123456789+01:00` (RFC 3339).

use serde::{Deserialize, Deserializer};

const SECOND: i128 = 1_000_000_000;

/// A moment, in nanoseconds since 1970. The default is long before, as is podman's word for never, the year 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(i128);

impl Moment {
    /// So many nanoseconds after 1970 began.
    #[must_use]
    pub fn of_ns(ns: i128) -> Self {
        Self(ns)
    }

    /// Reads it; none if it is none.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let (date, time) = text.split_once('T')?;
        let zone = time.find(['Z', '+', '-'])?;
        let (time, zone) = time.split_at(zone);
        let [year, month, day] = numbers(date, '-')?;
        let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
        let [hour, minute, second] = numbers(time, ':')?;
        let offset = match (zone.get(..1)?, zone.get(1..)?) {
            ("Z", "") => 0,
            (sign, zone) => {
                let [hours, minutes] = numbers(zone, ':')?;
                (hours * 60 + minutes) * if sign == "-" { -60 } else { 60 }
            }
        };
        if !(1..=12).contains(&month) || fraction.len() > 9 {
            return None;
        }
        let ns: u32 = format!("{fraction:0<9}").parse().ok()?;
        let seconds = days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset;
        Some(Self(i128::from(seconds) * SECOND + i128::from(ns)))
    }
}

impl Default for Moment {
    fn default() -> Self {
        Self(i128::from(days(1, 1, 1) * 86_400) * SECOND)
    }
}

impl<'de> Deserialize<'de> for Moment {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // All else that podman says counts even if one of its releases writes moments in another way.
        Ok(Self::read(&String::deserialize(deserializer)?).unwrap_or_default())
    }
}

/// So many numbers without signs.
fn numbers<const N: usize>(text: &str, between: char) -> Option<[i64; N]> {
    let parts: Vec<i64> = text.split(between).map(|it| it.parse::<u16>().ok().map(i64::from)).collect::<Option<_>>()?;
    parts.try_into().ok()
}

/// The days from 1970 to a day of the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    // A year that begins in March has its leap day at its end.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let of_year = (153 * month + 2) / 5;
    // From the first of March of the year 0 to 1970.
    year * 365 + leap_days + of_year + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_podman_writes_is_read_in_any_time_zone() {
        let second = |text: &str| Moment::read(text).map(|it| it.0 / SECOND);
        // By `date -d TEXT +%s`.
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T23:59:59Z", 951_868_799),
            ("2026-03-01T00:00:00.5Z", 1_772_323_200),
            ("2026-11-29T13:04:52.123456789+01:00", 1_795_953_892),
            ("2026-11-29T13:04:52.1-04:30", 1_795_973_692),
        ] {
            assert_eq!(second(text), Some(expected), "{text}");
        }
        assert_eq!(Moment::read("1970-01-01T00:00:00.25Z"), Some(Moment(SECOND / 4)));
        assert_eq!(Moment::read("0001-01-01T00:00:00Z"), Some(Moment::default()));
        assert!(Moment::read("2026-10-25T02:30:00+02:00") < Moment::read("2026-10-25T02:10:00+01:00"));
        for text in ["", "now", "2026-11-29", "2026-11-29T13:04:52", "2026-13-01T00:00:00Z", "2026-11-29T13:04:52.Zx"] {
            assert_eq!(Moment::read(text), None, "{text}");
        }
    }
}
