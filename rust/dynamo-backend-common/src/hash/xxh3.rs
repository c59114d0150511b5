//! XXH3 with 64 bits: the hash that names KV blocks.

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const PRIME_MX1: u64 = 0x1656_6791_9E37_79F9;
const PRIME_MX2: u64 = 0x9FB2_1C65_1E98_DF25;

const SECRET_BYTES: usize = 192;
const STRIPE_BYTES: usize = 64;
/// Stripes between two scrambles: each uses the secret from 8 bytes further on.
const BLOCK_STRIPES: usize = (SECRET_BYTES - STRIPE_BYTES) / 8;

#[rustfmt::skip]
const SECRET: [u8; SECRET_BYTES] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

/// Returns the hash of bytes under a seed.
pub(crate) fn hash64(input: &[u8], seed: u64) -> u64 {
    match input.len() {
        0 => spread_old(seed ^ word(&SECRET, 56) ^ word(&SECRET, 64)),
        1..=3 => of_3(input, seed),
        4..=8 => of_8(input, seed),
        9..=16 => of_16(input, seed),
        17..=128 => of_128(input, seed),
        129..=240 => of_240(input, seed),
        _ => of_long(input, seed),
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn half(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 4].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    (product as u64) ^ ((product >> 64) as u64)
}

fn spread(mut hash: u64) -> u64 {
    hash = (hash ^ (hash >> 37)).wrapping_mul(PRIME_MX1);
    hash ^ (hash >> 32)
}

fn spread_old(mut hash: u64) -> u64 {
    hash = (hash ^ (hash >> 33)).wrapping_mul(PRIME64_2);
    hash = (hash ^ (hash >> 29)).wrapping_mul(PRIME64_3);
    hash ^ (hash >> 32)
}

fn of_3(input: &[u8], seed: u64) -> u64 {
    let length = input.len();
    let (first, middle, last) = (u64::from(input[0]), u64::from(input[length >> 1]), u64::from(input[length - 1]));
    let combined = first << 16 | middle << 24 | last | (length as u64) << 8;
    spread_old(combined ^ (half(&SECRET, 0) ^ half(&SECRET, 4)).wrapping_add(seed))
}

fn of_8(input: &[u8], seed: u64) -> u64 {
    let length = input.len();
    let seed = seed ^ u64::from((seed as u32).swap_bytes()) << 32;
    let key = (word(&SECRET, 8) ^ word(&SECRET, 16)).wrapping_sub(seed);
    let mut hash = half(input, length - 4).wrapping_add(half(input, 0) << 32) ^ key;
    hash ^= hash.rotate_left(49) ^ hash.rotate_left(24);
    hash = hash.wrapping_mul(PRIME_MX2);
    hash ^= (hash >> 35).wrapping_add(length as u64);
    hash = hash.wrapping_mul(PRIME_MX2);
    hash ^ (hash >> 28)
}

fn of_16(input: &[u8], seed: u64) -> u64 {
    let length = input.len();
    let low = word(input, 0) ^ (word(&SECRET, 24) ^ word(&SECRET, 32)).wrapping_add(seed);
    let high = word(input, length - 8) ^ (word(&SECRET, 40) ^ word(&SECRET, 48)).wrapping_sub(seed);
    let sum = (length as u64).wrapping_add(low.swap_bytes()).wrapping_add(high).wrapping_add(fold(low, high));
    spread(sum)
}

fn mix(input: &[u8], at: usize, key: usize, seed: u64) -> u64 {
    let low = word(input, at) ^ word(&SECRET, key).wrapping_add(seed);
    let high = word(input, at + 8) ^ word(&SECRET, key + 8).wrapping_sub(seed);
    fold(low, high)
}

fn of_128(input: &[u8], seed: u64) -> u64 {
    let length = input.len();
    let mut sum = (length as u64).wrapping_mul(PRIME64_1);
    for pair in (0..=(length - 1) / 32).rev() {
        sum = sum.wrapping_add(mix(input, 16 * pair, 32 * pair, seed));
        sum = sum.wrapping_add(mix(input, length - 16 * (pair + 1), 32 * pair + 16, seed));
    }
    spread(sum)
}

fn of_240(input: &[u8], seed: u64) -> u64 {
    let length = input.len();
    let mut sum = (length as u64).wrapping_mul(PRIME64_1);
    for round in 0..8 {
        sum = sum.wrapping_add(mix(input, 16 * round, 16 * round, seed));
    }
    sum = spread(sum);
    for round in 8..length / 16 {
        sum = sum.wrapping_add(mix(input, 16 * round, 16 * (round - 8) + 3, seed));
    }
    spread(sum.wrapping_add(mix(input, length - 16, 136 - 17, seed)))
}

fn of_long(input: &[u8], seed: u64) -> u64 {
    let secret = secret_of(seed);
    let mut sums = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];
    let length = input.len();
    // The last stripe is always added apart, also where it overlaps the one before.
    let stripes = (length - 1) / STRIPE_BYTES;
    for number in 0..stripes {
        let place = number % BLOCK_STRIPES;
        accumulate(&mut sums, &input[number * STRIPE_BYTES..], &secret[8 * place..]);
        if place + 1 == BLOCK_STRIPES {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let key = word(&secret, SECRET_BYTES - STRIPE_BYTES + 8 * lane);
                *sum = (*sum ^ (*sum >> 47) ^ key).wrapping_mul(PRIME32_1);
            }
        }
    }
    accumulate(&mut sums, &input[length - STRIPE_BYTES..], &secret[SECRET_BYTES - STRIPE_BYTES - 7..]);
    let mut result = (length as u64).wrapping_mul(PRIME64_1);
    for pair in 0..4 {
        let key = 11 + 16 * pair;
        let (left, right) = (sums[2 * pair] ^ word(&secret, key), sums[2 * pair + 1] ^ word(&secret, key + 8));
        result = result.wrapping_add(fold(left, right));
    }
    spread(result)
}

fn secret_of(seed: u64) -> [u8; SECRET_BYTES] {
    let mut secret = SECRET;
    for at in (0..SECRET_BYTES).step_by(16) {
        secret[at..at + 8].copy_from_slice(&word(&SECRET, at).wrapping_add(seed).to_le_bytes());
        secret[at + 8..at + 16].copy_from_slice(&word(&SECRET, at + 8).wrapping_sub(seed).to_le_bytes());
    }
    secret
}

fn accumulate(sums: &mut [u64; 8], stripe: &[u8], secret: &[u8]) {
    for lane in 0..8 {
        let value = word(stripe, 8 * lane);
        let keyed = value ^ word(secret, 8 * lane);
        sums[lane ^ 1] = sums[lane ^ 1].wrapping_add(value);
        sums[lane] = sums[lane].wrapping_add((keyed & 0xffff_ffff).wrapping_mul(keyed >> 32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made with the reference implementation: length of the input, seed, hash. Byte n of an input is `(n * 7 + 3) % 256`.
    const VECTORS: &str = include_str!("../../tests/xxh3.txt");

    #[test]
    fn every_length_has_the_hash_of_the_reference_implementation() {
        let mut count = 0;
        for line in VECTORS.lines() {
            let mut fields = line.split(' ');
            let mut number = || fields.next().and_then(|field| field.parse::<u64>().ok()).expect("a number");
            let (length, seed, expected) = (number() as usize, number(), number());
            let input: Vec<u8> = (0..length).map(|n| (n * 7 + 3) as u8).collect();
            assert_eq!(hash64(&input, seed), expected, "{length} bytes, seed {seed}");
            count += 1;
        }
        assert!(count > 50);
    }
}
